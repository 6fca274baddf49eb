"""Capture files: what an engine sent, byte for byte, in one file (docs/capture-format.md).

`records` is the format, `writer` and `reader` the file, `folder` the older form of a folder,
`masking` the replacement of tokens and names, `recorder` and `player` the two ends on the wire,
`offline` and `checking` a capture run through the rules in process.
"""
