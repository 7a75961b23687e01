"""Files, checkpoints, locks and logs, on a disk or in a bucket."""

import os

# etils.epath, by which orbax and corpora reach gs://, then uses gcsfs and not TensorFlow: 400 MB
# less in every process, and requests that an emulator can answer (STORAGE_EMULATOR_HOST).
os.environ.setdefault("EPATH_USE_TF", "false")
# gcsfs asks for the kind of every bucket by gRPC, for zonal ones, which m4 does not use.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# gcsfs would keep the first listing of a folder for as long as the process lives: no new checkpoint
# would be seen, and ones that are removed would.
os.environ.setdefault("FSSPEC_GCS", '{"use_listings_cache": false}')
