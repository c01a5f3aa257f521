//! Sends data over TCP through a NIC, and checks it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use crate::guest::Guest;
use crate::host::tap::Subnet;

/// Time that a transfer may take. Even under emulation some 20 Mbit/s pass.
const LIMIT: Duration = Duration::from_secs(120);

impl Guest {
    /// Sends `len` bytes from the host's address in `subnet` to the guest and back, over one TCP connection each way.
    /// Panics unless they come back unchanged.
    pub fn transfer(&mut self, subnet: Subnet, len: usize) {
        let listener = TcpListener::bind((subnet.host(), 0)).expect("the host's address is configured");
        self.transfer_by(listener, subnet, len);
    }

    /// As [`Guest::transfer`], with a given listener, which the guest reaches at the host's address in `subnet`.
    pub fn transfer_by(&mut self, listener: TcpListener, subnet: Subnet, len: usize) {
        let port = listener.local_addr().expect("a listener has an address").port();
        let data = pattern(len, subnet.0.into());
        let sent = data.clone();
        let host = thread::spawn(move || {
            let mut to_guest = accept(&listener);
            to_guest.write_all(&sent).expect("the guest receives all bytes");
            to_guest.shutdown(Shutdown::Write).expect("the connection is still open");
            let _ = to_guest.read(&mut [0]);
            let mut back = Vec::with_capacity(sent.len());
            accept(&listener).read_to_end(&mut back).expect("the guest sends all bytes back");
            back
        });
        let (host_address, file) = (subnet.host(), format!("/tmp/transfer{}", subnet.0));
        // Give nc an input that never ends. At the end of its input, nc would close its half of the connection, and
        // passt sometimes resets a half-closed connection before all data has arrived.
        self.ok("[ -p /tmp/endless ] || mkfifo /tmp/endless");
        let take = format!("nc {host_address} {port} > {file} 0<> /tmp/endless && wc -c < {file}");
        let taken = self.ok_within(&take, LIMIT);
        assert_eq!(taken, len.to_string(), "bytes that the guest received from {host_address}");
        self.ok_within(&format!("nc {host_address} {port} < {file} && rm {file}"), LIMIT);
        let back = host.join().expect("the host's side of the transfer succeeds");
        // Compared here: a message with all bytes would be useless.
        let differs = data.iter().zip(&back).position(|(sent, back)| sent != back);
        assert_eq!(
            (back.len(), differs),
            (len, None),
            "bytes that came back to {host_address}, and the position of the first difference"
        );
    }
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().expect("the guest connects");
    stream.set_read_timeout(Some(LIMIT)).expect("a timeout can be set");
    stream.set_write_timeout(Some(LIMIT)).expect("a timeout can be set");
    stream
}

/// Bytes that do not repeat, different for each seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(len).collect()
}
