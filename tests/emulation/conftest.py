import pytest, pickle
from pathlib import Path
@pytest.fixture(scope="session")
def harness():
    from emulation import emulated
    h=emulated.Harness(pickle.load(open('/tmp/s2/emu/programs.pkl','rb')),Path('/tmp/s2/emu')); yield h; h.close()
