"""The Flower app of the job in flower_job.py. Both files lie in the app's package."""

from tcs_lab.studies import flower

from .flower_job import job

client = flower.client_app(job)
server = flower.server_app(job)
