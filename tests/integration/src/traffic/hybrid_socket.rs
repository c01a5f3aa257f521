//! The host's end of connections to a guest's vsock device: Unix sockets.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::pattern;

/// Time that a transfer may take in the nested lab.
const LIMIT: Duration = Duration::from_secs(240);

/// Connects to `port` of the guest, once a program listens there.
pub fn call(socket: &Path, port: u32) -> UnixStream {
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        let mut line = Vec::new();
        let mut byte = [0];
        while line.last() != Some(&b'\n') && matches!(stream.read(&mut byte), Ok(1)) {
            line.push(byte[0]);
        }
        if line.starts_with(b"OK ") {
            return stream;
        }
        assert!(Instant::now() < deadline, "no program listens on port {port}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Sends the pattern, closes this direction, and checks that the other side sends the same and closes its direction.
pub fn exchange(stream: &UnixStream, bytes: usize) -> Duration {
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = stream;
            for number in 0..bytes.div_ceil(pattern::PART) {
                stream.write_all(&pattern::part(number, bytes)).unwrap();
            }
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut stream = stream;
        pattern::check(&mut stream, bytes);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the end, after all of it");
    });
    began.elapsed()
}
