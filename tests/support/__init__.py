"""Models, meshes and comparisons that several test modules use, and programs that tests start as processes."""
