"""The doctor: what in a step keeps it from being captured?"""
