"""What every operator of a program costs: measured on a device, or estimated from its peak rates."""

from jaxpipe.profiling.roofline import Rates as Rates
from jaxpipe.profiling.roofline import rates_of as rates_of
