"""A user's plugin that registers nothing; whether it is imported can be seen."""
