"""Charts of schedules: text, SVG and pages."""
