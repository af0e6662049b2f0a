"""What every transport, channel and device must do: suites to run against one of your own.

A suite is a tuple of async functions, ``CASES``, that run under any test framework and event loop. What is
under test is described by a kit, which makes it.
"""
