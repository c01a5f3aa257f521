//! A client of the host that has not named a port yet: it must send `CONNECT <port>` and a newline.

use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// The maximum length of the line, with its newline.
const MAX_LINE: usize = 32;
const WORD: &str = "connect";

/// A client and the bytes that it has sent so far.
#[derive(Debug)]
pub(crate) struct Caller {
    pub stream: UnixStream,
    line: [u8; MAX_LINE],
    len: usize,
}

/// Request of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectRequest {
    /// The line is not complete.
    Unknown,
    /// To connect to this port of the guest.
    Port(u32),
    /// None: the client has disconnected, or sent something else.
    Nothing,
}

impl Caller {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self { stream, line: [0; MAX_LINE], len: 0 }
    }

    /// Reads the line as far as it has arrived, and nothing after it: that belongs to the guest.
    pub(crate) fn read(&mut self) -> ConnectRequest {
        while let Some(rest @ [_, ..]) = self.line.get_mut(self.len..) {
            let seen = match recv(&self.stream, &mut *rest, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((seen @ 1.., _)) => seen,
                Err(Errno::AGAIN) => return ConnectRequest::Unknown,
                Err(Errno::INTR) => continue,
                _ => return ConnectRequest::Nothing,
            };
            let seen = rest.iter().take(seen);
            let end = seen.clone().position(|byte| *byte == b'\n');
            let wanted = end.map_or(seen.len(), |end| end + 1);
            // These bytes wait already.
            match recv(&self.stream, rest.get_mut(..wanted).unwrap_or_default(), RecvFlags::DONTWAIT) {
                Ok((taken, _)) if taken == wanted => self.len += taken,
                Err(Errno::INTR) => continue,
                _ => return ConnectRequest::Nothing,
            }
            if end.is_some() {
                return port(self.line.get(..self.len).unwrap_or_default())
                    .map_or(ConnectRequest::Nothing, ConnectRequest::Port);
            }
        }
        ConnectRequest::Nothing
    }
}

/// The port of a line `CONNECT <port>`.
fn port(line: &[u8]) -> Option<u32> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (word, port) = (words.next()?, words.next()?);
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    if word.eq_ignore_ascii_case(WORD) && digits && words.next().is_none() { port.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn caller() -> (Caller, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        (Caller::new(near), far)
    }

    #[test]
    fn a_line_may_come_byte_by_byte_and_what_follows_it_is_left() {
        let (mut caller, mut client) = caller();
        for byte in b"CONNECT 1024" {
            client.write_all(&[*byte]).unwrap();
            assert_eq!(caller.read(), ConnectRequest::Unknown);
        }
        client.write_all(b"\nhello\n").unwrap();
        assert_eq!(caller.read(), ConnectRequest::Port(1024));
        let mut rest = [0; 6];
        caller.stream.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"hello\n");
    }

    #[test]
    fn a_client_that_leaves_or_sends_other_text_wants_nothing() {
        for line in
            ["", "CONNECT", "CONNECT 10", "\n", "CONNECT\n", "CONNECT x\n", "CONNECT +5\n", "CONNECT 4294967296\n"]
        {
            let (mut caller, mut client) = caller();
            client.write_all(line.as_bytes()).unwrap();
            drop(client);
            assert_eq!(caller.read(), ConnectRequest::Nothing, "{line:?}");
        }
        for line in ["CONNECT 1 2\n", "GET / HTTP/1.1\r\n", "\u{fc}\n", "CONNECT 1                        \n"] {
            let (mut caller, mut client) = caller();
            client.write_all(line.as_bytes()).unwrap();
            assert_eq!(caller.read(), ConnectRequest::Nothing, "{line:?}");
        }
    }

    #[test]
    fn a_line_has_32_bytes_at_most() {
        for (spaces, request) in [(22, ConnectRequest::Port(9)), (23, ConnectRequest::Nothing)] {
            let (mut caller, mut client) = caller();
            client.write_all(format!("connect {}9\n", " ".repeat(spaces)).as_bytes()).unwrap();
            assert_eq!(caller.read(), request);
        }
    }
}
