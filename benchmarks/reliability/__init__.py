"""Does training survive an hour of killed workers, saves and resumes?"""
