"""Makes a universal checkpoint of any checkpoint.

``convert`` is the way in, ``forecast`` says beforehand what it costs. A conversion (``conversion``)
is laid out as files (``target_files``) and items of work (``work``), which a pool of workers
(``pool``) does and a journal notes (``journal``); ``files`` is where bytes are written,
``source_checks`` verifies what is read by the source's own checksums, ``universal`` is the result.
"""
