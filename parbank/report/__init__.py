"""Pages to look at: a run, several runs beside each other, a study. Each is one HTML file that needs no network."""
