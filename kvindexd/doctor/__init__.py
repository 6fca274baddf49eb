"""`kvindexd doctor`: facts are gathered (gather.py), pure checks judge them, a report tells.

Every check is a function from Facts to hits; none does I/O. What a check needs and could not be
gathered is reported as not checked, with the reason, and never taken for sound.
"""
