"""Pipeline schedules as tables of data, pure Python: one file per schedule, one table, one simulator."""

from jaxpipe.schedules.gpipe import gpipe as gpipe
from jaxpipe.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from jaxpipe.schedules.simulate import Timeline as Timeline
from jaxpipe.schedules.simulate import simulate as simulate
from jaxpipe.schedules.table import Action as Action
from jaxpipe.schedules.table import Kind as Kind
from jaxpipe.schedules.table import Schedule as Schedule
