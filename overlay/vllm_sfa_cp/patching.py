"""placeholder replaced below"""

def apply_all():
    pass
