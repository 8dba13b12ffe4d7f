from hypothesis import settings

# no test depends on how fast the machine is; otherwise as configured (derandomized when CI is set)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
