"""parbank's models inside other programs: one file for each program, imported only where it is installed."""
