"""Properties that are computed once, without a lock.

Before Python 3.12 functools.cached_property has one for each property of a class. A process that is forked while
another thread computes such a property would find it held for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:
        """As functools has it; threads that ask at the same time may each compute it."""

        def __init__(self, function):
            self.func, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner, name):
            self._name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self.func(instance)
            return value
