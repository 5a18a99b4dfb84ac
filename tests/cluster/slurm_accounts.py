"""Slurm's own accounting for the tests' cluster: a database, and the daemon that keeps job records in it for sacct."""

import os
import pwd
import shutil
import socket
import subprocess

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb", "sacct", "sacctmgr")
DATABASE = "accounts"

CONTROLLER_LINES = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
"""
DAEMON_LINES = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser={user}
StoragePass=none
StorageLoc={database}
"""


def program(name):
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin")


def why_no_accounts():
    """The reason why the cluster keeps no accounts here; None where it does."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        packages = "apt-get install slurmdbd mariadb-server-core mariadb-client-core"
        return f"no accounting for Slurm on this machine ({', '.join(missing)} missing); on Debian: {packages}"
    return None


class Accounts:
    """Everybody may write into the database: it listens on this machine only, and is gone with its folder."""

    def __init__(self, cluster, port, database_port):
        self._cluster, self.port, self._database_port = cluster, port, database_port

    @property
    def controller_lines(self):
        return CONTROLLER_LINES.format(port=self.port, folder=self._cluster.folder)

    def start(self):
        self._start_database()
        self._write_configuration()
        self._cluster.daemon("slurmdbd", "-D")
        self._cluster.wait_until(self._knows_the_cluster, "slurmdbd")

    def _knows_the_cluster(self):
        """A controller whose cluster is not in the database ends at once; it is put in as soon as somebody answers."""
        self._cluster.call("sacctmgr", "-i", "add", "cluster", "joulelab")
        return "joulelab" in self._cluster.call("sacctmgr", "-n", "list", "cluster").stdout

    def _start_database(self):
        folder = self._cluster.folder
        made = [f"--datadir={folder}/database", f"--user={_user()}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True, "timeout": 60}
        subprocess.run([program("mariadb-install-db"), "--no-defaults", "--skip-test-db", *made], **quiet)
        place = [f"--socket={self.socket}", f"--port={self._database_port}", "--bind-address=127.0.0.1"]
        light = ["--skip-grant-tables", "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0"]
        self._cluster.daemon("mariadbd", "--no-defaults", *made, *place, *light, f"--pid-file={folder}/mariadbd.pid")
        self._cluster.wait_until(lambda: self.sql("select 1").returncode == 0, "the database")

    def _write_configuration(self):
        path = self._cluster.folder / "slurmdbd.conf"
        path.write_text(
            DAEMON_LINES.format(
                folder=self._cluster.folder,
                host=socket.gethostname().partition(".")[0],
                user=_user(),
                port=self.port,
                database_port=self._database_port,
                database=DATABASE,
            )
        )
        path.chmod(0o600)  # slurmdbd insists

    @property
    def socket(self):
        return self._cluster.folder / "database.socket"

    def sql(self, command):
        return self._cluster.call("mariadb", "--no-defaults", f"--socket={self.socket}", "--execute", command)


def _user():
    return pwd.getpwuid(os.getuid()).pw_name
