"""Speed and quality beside other engines, measured by hand: nothing here is collected as a test, no time is asserted."""
