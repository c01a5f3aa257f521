//! Descriptors for a target on the same host, on a separate connection (`unix(7)`, SCM_RIGHTS).
//!
//! Starts with their number, in 4 bytes. Then a byte accompanies each batch.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Limit on the time between two messages of the source.
const PATIENCE: Duration = Duration::from_secs(10);
/// Descriptors per byte.
const TOGETHER: usize = 64;

/// Sends `fds`.
///
/// # Errors
///
/// Fails if the connection is lost.
pub(super) fn send(stream: &UnixStream, fds: &[OwnedFd]) -> io::Result<()> {
    let count = u32::try_from(fds.len()).map_err(io::Error::other)?;
    (&*stream).write_all(&count.to_le_bytes())?;
    for some in fds.chunks(TOGETHER) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TOGETHER))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = some.iter().map(AsFd::as_fd).collect();
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let byte = [some.len() as u8];
        while let Err(errno) = sendmsg(stream, &[IoSlice::new(&byte)], &mut control, SendFlags::NOSIGNAL) {
            if errno != rustix::io::Errno::INTR {
                return Err(errno.into());
            }
        }
    }
    Ok(())
}

/// Receives `offered` descriptors.
///
/// # Errors
///
/// Fails if the connection is lost or silent for [`PATIENCE`], the number differs, or this process cannot hold so many.
pub(super) fn receive(stream: &UnixStream, offered: usize) -> io::Result<Vec<OwnedFd>> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let late = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "they took too long"),
        _ => error,
    };
    let mut count = [0; 4];
    (&*stream).read_exact(&mut count).map_err(late)?;
    let (count, mut all) = (u32::from_le_bytes(count) as usize, Vec::new());
    if count != offered {
        let what = format!("{count} were announced, and {offered} were offered");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    while all.len() < count {
        let before = all.len();
        receive_some(stream, &mut all).map_err(late)?;
        if all.len() == before || all.len() > count {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "other descriptors came than were announced"));
        }
    }
    Ok(all)
}

fn receive_some(stream: &UnixStream, all: &mut Vec<OwnedFd>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TOGETHER))];
    let (mut control, mut byte) = (RecvAncillaryBuffer::new(&mut space), [0]);
    let received = loop {
        match recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?,
        }
    };
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("this process may not have so many open files (ulimit -n)"));
    }
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            all.extend(fds);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    fn files(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| tempfile::tempfile().unwrap().into()).collect()
    }

    #[test]
    fn descriptors_arrive_in_their_order_however_many_there_are() {
        for count in [0, 1, 64, 65, 200] {
            let (source, target) = UnixStream::pair().unwrap();
            let sent = files(count);
            for (index, fd) in sent.iter().enumerate() {
                rustix::io::pwrite(fd, &(index as u32).to_le_bytes(), 0).unwrap();
            }
            let sends = std::thread::spawn(move || send(&source, &sent).map(|()| sent));
            let received = receive(&target, count).unwrap();
            assert_eq!(received.len(), sends.join().unwrap().unwrap().len());
            for (index, fd) in received.iter().enumerate() {
                let mut bytes = [0; 4];
                rustix::io::pread(fd, &mut bytes, 0).unwrap();
                assert_eq!(u32::from_le_bytes(bytes), index as u32);
                assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
                assert!(fd.as_raw_fd() > 2);
            }
        }
    }

    #[test]
    fn unannounced_or_missing_descriptors_are_an_error() {
        let (source, target) = UnixStream::pair().unwrap();
        (&source).write_all(&[1, 0, 0, 0, 1]).unwrap();
        assert!(receive(&target, 1).unwrap_err().to_string().contains("than were announced"));
        (&source).write_all(&[1, 0]).unwrap();
        drop(source);
        assert_eq!(receive(&target, 1).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        // A number above the offer is refused before a descriptor is read.
        let (source, target) = UnixStream::pair().unwrap();
        (&source).write_all(&u32::MAX.to_le_bytes()).unwrap();
        let error = receive(&target, 1).unwrap_err().to_string();
        assert_eq!(error, "4294967295 were announced, and 1 were offered");
        let (source, target) = UnixStream::pair().unwrap();
        let both = files(2);
        (&source).write_all(&[1, 0, 0, 0]).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = both.iter().map(AsFd::as_fd).collect();
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&source, &[IoSlice::new(&[2])], &mut control, SendFlags::NOSIGNAL).unwrap();
        assert!(receive(&target, 1).is_err());
    }
}
