"""Pipeline schedules as tables of data, pure Python: one table, one simulator.

In: numbers of stages and micro-batches; seconds, where a schedule is searched for or simulated.
Out: tables that say which device works on which micro-batch when. A runtime runs every table that
``Schedule.validate`` lets through: those made here, and your own.
"""

from jaxpipe.schedules.asynchronous import double_buffered as double_buffered
from jaxpipe.schedules.asynchronous import local_accumulation as local_accumulation
from jaxpipe.schedules.asynchronous import pipedream as pipedream
from jaxpipe.schedules.csv_notation import from_csv as from_csv
from jaxpipe.schedules.csv_notation import to_csv as to_csv
from jaxpipe.schedules.list_scheduling import list_schedule as list_schedule
from jaxpipe.schedules.list_scheduling import makespan_bound as makespan_bound
from jaxpipe.schedules.ordered import from_orders as from_orders
from jaxpipe.schedules.replicas import StageReplicas as StageReplicas
from jaxpipe.schedules.schedule_makers import BY_NAME as BY_NAME
from jaxpipe.schedules.simulate import Timeline as Timeline
from jaxpipe.schedules.simulate import simulate as simulate
from jaxpipe.schedules.stage_map import v_shape as v_shape
from jaxpipe.schedules.synchronous import dual_pipe_v as dual_pipe_v
from jaxpipe.schedules.synchronous import gpipe as gpipe
from jaxpipe.schedules.synchronous import interleaved as interleaved
from jaxpipe.schedules.synchronous import one_f_one_b as one_f_one_b
from jaxpipe.schedules.synchronous import v_half as v_half
from jaxpipe.schedules.synchronous import zero_bubble as zero_bubble
from jaxpipe.schedules.synchronous import zero_bubble_v as zero_bubble_v
from jaxpipe.schedules.table import Action as Action
from jaxpipe.schedules.table import Kind as Kind
from jaxpipe.schedules.table import Schedule as Schedule
