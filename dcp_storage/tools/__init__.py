"""Looking at checkpoints and keeping them: functions that return reports and print nothing."""
