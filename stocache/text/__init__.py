"""Batches of tensors from text files of any size: `StreamLoader`, its formats and its options.

The path of one row, with a `CsvFormat` and threads:

1. `OpenFile.read_at` (open_file) reads bytes of a file, and decompresses them.
2. `Lines.read` (lines) cuts the bytes into chunks of whole lines, until it has the rows of one buffer.
3. `RowFinder.find` (rows) leaves out the lines of a chunk that are not rows.
4. `Buffers.fetch` (buffers) publishes where the next buffer begins. It returns the chunks; or the cached buffer.
5. `RowParser.bulk` (parsers) has pyarrow (arrow) parse a chunk, and makes arrays of features and labels.
6. `Buffers.parse` (buffers) joins the arrays of a buffer, and puts them into the cache.
7. `Windows.deliver` (windows) joins the buffers of a window, shuffles the rows and cuts them into batches.
8. `StreamLoader.__iter__` (loader) yields the batches.

One thread does steps 1 to 4, in order; other threads do 5 to 7. In a `DataLoader` each worker process does all seven for its
windows.
"""
