"""Measurements that say something about speed; `README.md` tells what each can and cannot show."""
