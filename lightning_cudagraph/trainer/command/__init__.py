"""The console command, and the doctor: what in a step keeps it from being captured?"""
