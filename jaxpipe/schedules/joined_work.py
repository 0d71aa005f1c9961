"""Work of a stage that is one program, where each stage has programs of its own."""

from jaxpipe.schedules.table import Kind, Schedule


#: Work in one program.
Kinds = tuple[Kind, ...]


def program_kinds(schedule: Schedule, s: int) -> list[Kinds]:
    """Return which kinds of a stage's work are one program each.

    The last stage goes on with the backward pass at once where its device does nothing in between: its stash then
    never leaves the program.
    """
    chunk, order = schedule.chunk(s), list(schedule.order(schedule.device(s)))
    actions = [(k, action) for k, action in enumerate(order) if action.chunk == chunk]
    kinds = list(dict.fromkeys(action.kind for _, action in actions))
    back = schedule.backward_kind
    forward = [(k, action) for k, action in actions if action.kind is Kind.FORWARD]
    goes_on = s + 1 == schedule.total_stages and back in kinds
    if not goes_on or any(order[k + 1 : k + 2] != [action._replace(kind=back)] for k, action in forward):
        return [(kind,) for kind in kinds]
    return [(Kind.FORWARD, back), *((kind,) for kind in kinds if kind not in (Kind.FORWARD, back))]
