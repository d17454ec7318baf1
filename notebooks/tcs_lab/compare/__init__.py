"""Compare: anybody's method in the table of the track, params/compare.yaml.

track.py     the training that all methods share, and how their rates are tuned
methods.py   methods from a file: which there are, and what each of its three forms becomes
tensors.py   a class with `compress` and `decompress` as the clients and the server of a scheme
packing.py   its tensors and contexts as bytes
low_rank.py  a stored method of that form
scoring.py   rows: accuracy, bytes, what others reach at the same bytes
probe.py     a few rounds beside TCS: their time, and what a shorter code makes of the bytes
table.py     the table and the picture
command.py   `tcs compare`
"""
