"""What happened, step by step? Recorded beside the decoding of a request, and drawn as a page.

    recorder.py   stands between the loop and the target, and remembers what went by
    page.py       one HTML file that shows it: page.html with the steps put in
"""
