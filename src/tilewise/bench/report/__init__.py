"""`tilewise report`: what one machine measured, as a page to look at and to send, and as JSON to compare with.

rows.py says which problems, machine.py what they ran on, gather.py measures them into a Report (model.py). page.py
makes its page with tables.py, charts.py, figures.py, markup.py, page.css and page.js; compare.py sets two Reports side
by side. command.py is the command.
"""
