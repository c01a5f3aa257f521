//! Sockets of the address family AF_VSOCK, which connect programs of a guest with those of its host.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Any context ID, to listen (`VMADDR_CID_ANY`).
const ANY: u32 = u32::MAX;
/// The host's context ID.
const HOST: u32 = 2;
const LENGTH: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

/// Connects to `port` of the host.
///
/// # Errors
///
/// Fails if the system refuses, or no program listens there.
pub fn connect_to_host(port: u32) -> io::Result<File> {
    let (socket, address) = (socket()?, address(HOST, port));
    // SAFETY: the address lives through the call, and has the given length.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) })?;
    Ok(File::from(socket))
}

/// A socket that accepts connections.
pub struct VmListener(OwnedFd);

impl VmListener {
    /// Listens on `port`.
    ///
    /// # Errors
    ///
    /// Fails if the system refuses, or another program listens there.
    pub fn bind(port: u32) -> io::Result<VmListener> {
        let (socket, address) = (socket()?, address(ANY, port));
        // SAFETY: the address lives through the call, and has the given length.
        check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) })?;
        // SAFETY: the call takes no pointers.
        check(unsafe { libc::listen(socket.as_raw_fd(), 8) })?;
        Ok(VmListener(socket))
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    ///
    /// Fails if the system refuses.
    pub fn accept(&self) -> io::Result<File> {
        // SAFETY: no address is requested.
        let fd = check(unsafe { libc::accept(self.0.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut()) })?;
        // SAFETY: the descriptor was just opened and has no other owner.
        Ok(unsafe { File::from_raw_fd(fd) })
    }
}

/// Closes this direction of a connection over any kind of socket.
///
/// # Errors
///
/// Fails if it is not connected.
pub fn end_writing(stream: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `stream`.
    check(unsafe { libc::shutdown(stream.as_raw_fd(), libc::SHUT_WR) }).map(drop)
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = check(unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor was just opened and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    (address.svm_cid, address.svm_port) = (cid, port);
    address
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
