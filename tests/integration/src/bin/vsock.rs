//! One end of a connection by AF_VSOCK, for a guest. Its other end is a test's, over the VMM's Unix sockets.
//!
//! `vsock listen PORT BYTES` takes one connection, `vsock connect PORT BYTES` makes one to the host. Both then send so
//! many bytes of a pattern, end their direction, and check that as many of the same come from the other side, and its
//! end. They print `same BYTES`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed check panics and says where")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;

use integration::pattern;

/// Any context ID, to listen (`VMADDR_CID_ANY`).
const ANY: u32 = u32::MAX;
/// The host's context ID.
const HOST: u32 = 2;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, port, bytes] = arguments.as_slice() else { panic!("vsock listen|connect PORT BYTES") };
    let (port, bytes) = (port.parse().unwrap(), bytes.parse().unwrap());
    let connection = if role == "listen" { accept(port) } else { connect(port) }.unwrap();
    exchange(&connection, bytes);
    println!("same {bytes}");
}

/// Sends `bytes` bytes, and reads as many at the same time.
fn exchange(connection: &OwnedFd, bytes: usize) {
    let mut sender = File::from(connection.try_clone().unwrap());
    let mut receiver = File::from(connection.try_clone().unwrap());
    let sending = thread::spawn(move || {
        for part in 0..bytes.div_ceil(pattern::PART) {
            sender.write_all(&pattern::part(part, bytes)).unwrap();
        }
        // SAFETY: the descriptor is open as long as `sender`.
        assert_eq!(unsafe { libc::shutdown(sender.as_raw_fd(), libc::SHUT_WR) }, 0);
    });
    pattern::check(&mut receiver, bytes);
    assert_eq!(receiver.read(&mut [0]).unwrap(), 0, "the end, after all of it");
    sending.join().unwrap();
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor has just been opened, and nobody else has it.
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

const LENGTH: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

fn connect(port: u32) -> io::Result<OwnedFd> {
    let (socket, address) = (socket()?, address(HOST, port));
    // SAFETY: the address lives through the call, and has this length.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) })?;
    Ok(socket)
}

fn accept(port: u32) -> io::Result<OwnedFd> {
    let (socket, address) = (socket()?, address(ANY, port));
    // SAFETY: the address lives through the call, and has this length.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) })?;
    // SAFETY: the call takes no pointers.
    check(unsafe { libc::listen(socket.as_raw_fd(), 8) })?;
    println!("listening");
    // SAFETY: no address is asked for.
    let fd = check(unsafe { libc::accept(socket.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut()) })?;
    // SAFETY: the descriptor has just been opened, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
