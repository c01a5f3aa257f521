//! Third-party programs that serve a guest's file system or disk over vhost-user: virtiofsd and qemu-storage-daemon.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::peers::{Peer, is_listening};

/// A program with a vhost-user socket. It is killed when this is dropped.
pub struct StoragePeer {
    _peer: Peer,
    socket: PathBuf,
}

impl StoragePeer {
    /// A virtiofsd that serves `shared` to guests. Its socket `name` is in `folder`. It ends when its VMM disconnects.
    pub fn virtiofsd(folder: &Path, name: &str, shared: &Path) -> StoragePeer {
        // virtiofsd is not in PATH. A machine whose root is an initramfs cannot leave that for a sandbox.
        let mut command = Command::new("/usr/libexec/virtiofsd");
        command.args(["--sandbox=none", "--seccomp=none", "--inode-file-handles=never", "--shared-dir"]).arg(shared);
        StoragePeer::start(folder, name, |socket| {
            command.arg("--socket-path").arg(socket);
            command
        })
    }

    /// A qemu-storage-daemon that serves the raw image `image` as a disk with two queues. Its socket `name` is in
    /// `folder`.
    pub fn qemu_storage_daemon(folder: &Path, name: &str, image: &Path) -> StoragePeer {
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!("driver=file,node-name=disk,filename={}", image.display()));
        StoragePeer::start(folder, name, |socket| {
            let export = "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=2,addr.type=unix";
            command.arg("--export").arg(format!("{export},addr.path={}", socket.display()));
            command
        })
    }

    fn start(folder: &Path, name: &str, command: impl FnOnce(&Path) -> Command) -> StoragePeer {
        let socket = folder.join(name);
        // A killed peer leaves its socket, which would be mistaken for the new one.
        let _ = fs::remove_file(&socket);
        let mut command = command(&socket);
        command.stdin(Stdio::null());
        let mut peer = Peer::start(command, socket.with_extension("log"));
        peer.wait_until(|| is_listening(&socket));
        StoragePeer { _peer: peer, socket }
    }

    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
