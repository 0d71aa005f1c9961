"""What goes where: the order of operators, the cuts between stages, bytes and seconds, the plan."""
