"""The command line: one thin file per command, imported only when it is asked for."""
