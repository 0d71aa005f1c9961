"""Plans as pictures, HTML reports and trace files, for people.

In: a plan, its schedule, timelines that were predicted or measured, bytes.
Out: matplotlib figures, one HTML page, traces for Perfetto.
"""

from jaxpipe.visualize import pictures as pictures
from jaxpipe.visualize import traces as traces
