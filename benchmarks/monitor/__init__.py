"""What does `StallMonitor` cost a step?"""
