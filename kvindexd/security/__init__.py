"""Who may call, over what, how much, and where a registration may lead.

`roles`, `credentials`, `networks` and `exposure` are pure; `certificates`, `tokens` and `gate`
read files and ask DNS.
"""
