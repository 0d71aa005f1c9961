"""Costs of every operator of a program: measured on a device, or estimated from its peak rates."""

from jaxpipe.rates import Rates as Rates
from jaxpipe.rates import rates_of as rates_of
