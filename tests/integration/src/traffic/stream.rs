//! A TCP connection between a guest and the host that survives operations on the guest.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::guest::Guest;
use crate::host::tap::Subnet;

/// Time limit for an echo. TCP retransmits lost bytes after increasing waits.
const LIMIT: Duration = Duration::from_secs(60);

/// A TCP connection from the guest that echoes each line.
pub struct Stream(TcpStream);

impl Stream {
    /// Opens the connection through the NIC in `subnet`. A guest has only one.
    pub fn open(guest: &mut Guest, subnet: Subnet) -> Stream {
        let listener = TcpListener::bind((subnet.host(), 0)).expect("the host's address is configured");
        Stream::open_by(listener, guest, subnet)
    }

    /// As [`Stream::open`], with a given listener, which the guest reaches at the host's address in `subnet`.
    pub fn open_by(listener: TcpListener, guest: &mut Guest, subnet: Subnet) -> Stream {
        let port = listener.local_addr().expect("a listener has an address").port();
        guest.ok("mkfifo /tmp/echo");
        // One opening for both: opening one end of a named pipe waits for the other.
        guest.ok(&format!("nc {} {port} 0<> /tmp/echo 1>&0 &", subnet.host()));
        let (stream, _) = listener.accept().expect("the guest connects");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout can be set");
        Stream(stream)
    }

    /// Asserts that `text` is echoed.
    pub fn assert_alive(&mut self, text: &[u8]) {
        self.0.write_all(text).expect("the connection is open");
        let mut back = vec![0; text.len()];
        self.0.read_exact(&mut back).expect("what was sent comes back");
        assert_eq!(back, text);
    }
}
