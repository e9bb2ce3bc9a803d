"""One engine over several processes. Process 0 schedules, answers and counts; each of the others
runs the programs that it is told of, on its own devices, with the arrays of the host that come with
the message. Nothing that a step needs is decided anywhere but on process 0.

Messages go over one TCP connection a process (`link`), one for each run of a program
(`program_run`): that costs process 0 about 10 us, where a device collective takes 2 ms and the
coordination service's key-value store 0.4 ms (two processes on loopback, CPU, 1.3 KB, 2026-11-30),
and it needs nothing of devices on which two steps are in flight already.
"""
