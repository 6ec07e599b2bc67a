"""A module of a part that is installed, without a library that it needs."""

import no_such_library

x = no_such_library
