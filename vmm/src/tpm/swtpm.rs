//! The swtpm protocol: a control channel with big-endian numbers, and a data channel for TPM commands and responses
//! (swtpm's `man swtpm_ioctls`, and `tpm_ioctl.h`).

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sendmsg, socket_with,
};

use crate::tpm::crb::{BUFFER_LEN, HEADER};
use crate::tpm::error::TpmError;

const GET_CAPABILITY: u32 = 1;
const INIT: u32 = 2;
const SHUTDOWN: u32 = 3;
const CANCEL: u32 = 9;
const STOP: u32 = 14;
const SET_DATAFD: u32 = 16;
const SET_BUFFERSIZE: u32 = 17;

/// Capability bits of INIT, SHUTDOWN, CANCEL, STOP, SET_DATAFD and SET_BUFFERSIZE.
const NEEDED: u64 = 1 | 1 << 1 | 1 << 5 | 1 << 10 | 1 << 12 | 1 << 13;
/// Timeout of a reply on the control channel.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to a swtpm.
pub(super) struct Swtpm {
    path: PathBuf,
    control: UnixStream,
    data: UnixStream,
    lost: bool,
}

impl Swtpm {
    /// Connects to the swtpm at `path`, and passes it a data channel.
    ///
    /// # Errors
    ///
    /// Fails if no program listens there, or it is not swtpm.
    pub(super) fn connect(path: &Path) -> Result<Self, TpmError> {
        let control = connect(path).map_err(|error| TpmError::Connect { path: path.into(), error })?;
        let fail = |what| move |error| TpmError::Io { path: path.into(), what, error };
        for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
            set(&control, Some(PATIENCE)).map_err(fail("set a time limit"))?;
        }
        let (data, theirs) = UnixStream::pair().map_err(fail("make a socket"))?;
        data.set_write_timeout(Some(PATIENCE)).map_err(fail("set a time limit"))?;
        data.set_read_timeout(Some(PATIENCE)).map_err(fail("set a time limit"))?;
        let mut swtpm = Self { path: path.into(), control, data, lost: false };
        let [abilities] = swtpm
            .ask("ask swtpm what it can do", GET_CAPABILITY, &[])
            .map(|answer: [u8; 8]| [u64::from_be_bytes(answer)])?;
        if abilities & NEEDED != NEEDED {
            return Err(TpmError::Abilities { path: path.into(), abilities });
        }
        swtpm.pass(&theirs).map_err(fail("pass swtpm a socket"))?;
        let result = swtpm.read("pass swtpm a socket")?;
        swtpm.check("take a socket", result)?;
        Ok(swtpm)
    }

    /// Reconnects.
    ///
    /// # Errors
    ///
    /// As [`Self::connect`].
    pub(super) fn reconnect(&mut self) -> Result<(), TpmError> {
        *self = Self::connect(&self.path)?;
        Ok(())
    }

    /// True if the connection has failed or was closed.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Closes the connection.
    pub(super) fn give_up(&mut self) {
        self.lost = true;
        // swtpm notices the end, and accepts the next connection once its command is done.
        let _ = self.data.shutdown(std::net::Shutdown::Both);
        let _ = self.control.shutdown(std::net::Shutdown::Both);
    }

    /// Resets the TPM to its power-on state.
    ///
    /// # Errors
    ///
    /// Fails if swtpm refuses or disconnects.
    pub(super) fn power_on(&mut self) -> Result<(), TpmError> {
        let result = self.ask("stop the TPM", STOP, &[])?;
        self.check("stop the TPM", result)?;
        let len = (BUFFER_LEN as u32).to_be_bytes();
        let answer: [u8; 16] = self.ask("set the size of commands", SET_BUFFERSIZE, &len)?;
        let result = answer.first_chunk().copied().unwrap_or([0xff; 4]);
        self.check("set the size of commands", result)?;
        // No flags: there is no stored volatile state.
        let result = self.ask("start the TPM", INIT, &[0; 4])?;
        self.check("start the TPM", result)
    }

    /// Cancels the running command, if the TPM supports that.
    ///
    /// # Errors
    ///
    /// Fails if swtpm disconnects.
    pub(super) fn cancel(&mut self) -> Result<(), TpmError> {
        // A refusal is fine: the command may just have ended.
        self.ask("cancel a command", CANCEL, &[]).map(|_: [u8; 4]| ())
    }

    /// Reports the machine's power-off, so that swtpm stores its state.
    pub(super) fn shut_down(mut self) {
        if !self.lost
            && let Err(error) = self.ask("shut the TPM down", SHUTDOWN, &[]).map(|_: [u8; 4]| ())
        {
            log::warn!("{error}");
        }
    }

    /// Returns the channel of responses.
    pub(super) fn data(&self) -> &UnixStream {
        &self.data
    }

    /// Sends a command of the guest.
    ///
    /// # Errors
    ///
    /// Fails if swtpm disconnects.
    pub(super) fn send(&mut self, command: &[u8]) -> Result<(), TpmError> {
        let sent = if self.lost { Err(io::ErrorKind::NotConnected.into()) } else { self.data.write_all(command) };
        sent.map_err(|error| self.lose("send a command", error))
    }

    /// True if a response or the end of the connection has arrived.
    ///
    /// # Errors
    ///
    /// Fails if swtpm disconnects.
    pub(super) fn has_response(&mut self) -> Result<bool, TpmError> {
        let mut fds = [PollFd::new(&self.data, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        ready.map(|ready| ready > 0).map_err(|error| self.lose("wait for a response", error.into()))
    }

    /// Receives a response.
    ///
    /// # Errors
    ///
    /// Fails if swtpm disconnects, or the response is malformed.
    pub(super) fn receive(&mut self) -> Result<Vec<u8>, TpmError> {
        self.response().map_err(|error| self.lose("receive a response", error))
    }

    fn response(&mut self) -> io::Result<Vec<u8>> {
        let mut response = vec![0; HEADER];
        self.data.read_exact(&mut response)?;
        let size = response.get(2..).and_then(<[u8]>::first_chunk).map_or(0, |size| u32::from_be_bytes(*size));
        match usize::try_from(size) {
            Ok(size) if (HEADER..=BUFFER_LEN).contains(&size) => {
                response.resize(size, 0);
                self.data.read_exact(response.get_mut(HEADER..).unwrap_or_default())?;
                Ok(response)
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn lose(&mut self, what: &'static str, error: io::Error) -> TpmError {
        self.lost = true;
        TpmError::Io { path: self.path.clone(), what, error }
    }

    /// Sends a control command and returns the reply.
    fn ask<const N: usize>(&mut self, what: &'static str, command: u32, rest: &[u8]) -> Result<[u8; N], TpmError> {
        let request = [&command.to_be_bytes(), rest].concat();
        let sent = self.control.write_all(&request);
        sent.map_err(|error| self.lose(what, error))?;
        self.read(what)
    }

    fn read<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], TpmError> {
        let mut answer = [0; N];
        self.control.read_exact(&mut answer).map_err(|error| self.lose(what, error))?;
        Ok(answer)
    }

    fn check(&self, what: &'static str, result: [u8; 4]) -> Result<(), TpmError> {
        match u32::from_be_bytes(result) {
            0 => Ok(()),
            result => Err(TpmError::Refused { path: self.path.clone(), what, result }),
        }
    }

    /// Passes its end of the data channel to swtpm.
    fn pass(&self, theirs: &UnixStream) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [theirs.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let command = SET_DATAFD.to_be_bytes();
        sendmsg(&self.control, &[IoSlice::new(&command)], &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// Connects to the program at `path`, without waiting for it to accept.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
