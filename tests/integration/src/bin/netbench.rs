//! Measures throughput and latency between a guest and its host: both ends of the measurement of `cargo xtask bench`.
//!
//! The program is static, so that both measure with the same code. `netbench server PLACE` serves until killed;
//! `netbench client PLACE TEST SECONDS` measures once and prints one line. A place is an IPv4 address, for TCP and UDP;
//! `vsock`, the host's port by AF_VSOCK; or, for a server only, the path of a Unix socket.
//!
//! | test | prints |
//! |---|---|
//! | `bulk-out` | Mbit/s that reached the server |
//! | `bulk-in` | Mbit/s that reached the client |
//! | `requests` | one-byte transactions per second, and the 99th percentile of their duration in us |
//! | `datagrams-out` | Mbit/s of datagrams of 64 bytes that reached the server |

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed measurement panics and says where")]

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use integration::{VmListener, connect_to_host, end_writing, transactions};

/// The server's port.
const PORT: u16 = 5909;
/// Bytes per write in the bulk tests.
const CHUNK: usize = 128 * 1024;
/// Bytes per datagram.
const DATAGRAM: usize = 64;
/// Time after the last one was sent in which a datagram may arrive.
const STRAGGLER: Duration = Duration::from_millis(100);

/// Kind of measurement. The client sends the server this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    BulkOut = 1,
    BulkIn = 2,
    Requests = 3,
    DatagramsOut = 4,
}

impl Test {
    const ALL: [(&str, Test); 4] = [
        ("bulk-out", Test::BulkOut),
        ("bulk-in", Test::BulkIn),
        ("requests", Test::Requests),
        ("datagrams-out", Test::DatagramsOut),
    ];

    fn by_number(number: u8) -> Option<Test> {
        Test::ALL.iter().map(|(_, test)| *test).find(|test| *test as u8 == number)
    }
}

/// Place of the server.
enum Place {
    Network(Ipv4Addr),
    Vsock,
    Unix(PathBuf),
}

impl Place {
    fn new(text: &str) -> Place {
        match text.parse() {
            Ok(address) => Place::Network(address),
            Err(_) if text == "vsock" => Place::Vsock,
            Err(_) => Place::Unix(text.into()),
        }
    }

    fn connect(&self) -> File {
        match self {
            Place::Network(host) => of_tcp(TcpStream::connect(SocketAddr::from((*host, PORT))).unwrap()),
            Place::Vsock => connect_to_host(PORT.into()).unwrap(),
            Place::Unix(path) => panic!("{}: only a server can be there", path.display()),
        }
    }

    /// Listens there. Each call of what is returned waits for the next client.
    fn listen(&self) -> Box<dyn Fn() -> File> {
        match self {
            Place::Network(address) => {
                let listener = TcpListener::bind((*address, PORT)).unwrap();
                Box::new(move || of_tcp(listener.accept().unwrap().0))
            }
            Place::Vsock => {
                let listener = VmListener::bind(PORT.into()).unwrap();
                Box::new(move || listener.accept().unwrap())
            }
            Place::Unix(path) => {
                let listener = UnixListener::bind(path).unwrap();
                Box::new(move || File::from(OwnedFd::from(listener.accept().unwrap().0)))
            }
        }
    }
}

fn of_tcp(stream: TcpStream) -> File {
    stream.set_nodelay(true).unwrap();
    File::from(OwnedFd::from(stream))
}

/// The bytes that arrived, and the time from the first to the last.
struct Arrived {
    bytes: u64,
    time: Duration,
}

impl Arrived {
    fn megabits(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.time.as_secs_f64() / 1e6
    }

    fn send(&self, stream: &mut File) {
        let nanoseconds = u64::try_from(self.time.as_nanos()).unwrap();
        stream.write_all(&[self.bytes.to_le_bytes(), nanoseconds.to_le_bytes()].concat()).unwrap();
    }

    fn receive(stream: &mut File) -> Arrived {
        let bytes = number(stream);
        Arrived { bytes, time: Duration::from_nanos(number(stream)) }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["server", place] => serve(&Place::new(place)),
        ["client", place, test, seconds] => {
            let (_, test) = Test::ALL.into_iter().find(|(name, _)| name == test).unwrap();
            measure(&Place::new(place), test, Duration::from_secs_f64(seconds.parse().unwrap()));
        }
        _ => panic!("usage: netbench server PLACE | netbench client PLACE TEST SECONDS"),
    }
}

/// Serves clients until killed.
fn serve(place: &Place) {
    let next_client = place.listen();
    println!("ready");
    loop {
        let stream = next_client();
        thread::spawn(|| answer(stream));
    }
}

fn answer(mut stream: File) {
    let mut kind = [0];
    stream.read_exact(&mut kind).unwrap();
    let limit = Duration::from_nanos(number(&mut stream));
    match Test::by_number(kind[0]).unwrap() {
        Test::BulkOut => take_all(&mut stream).send(&mut stream),
        Test::BulkIn => send_all(&mut stream, limit),
        Test::Requests => echo(&mut stream),
        Test::DatagramsOut => take_datagrams(&mut stream),
    }
}

/// Runs `test` for `limit` against the server at `place`, and prints the result.
fn measure(place: &Place, test: Test, limit: Duration) {
    let mut stream = place.connect();
    let nanoseconds = u64::try_from(limit.as_nanos()).unwrap();
    stream.write_all(&[&[test as u8][..], &nanoseconds.to_le_bytes()].concat()).unwrap();
    match test {
        Test::BulkOut => {
            send_all(&mut stream, limit);
            println!("{:.1}", Arrived::receive(&mut stream).megabits());
        }
        Test::BulkIn => println!("{:.1}", take_all(&mut stream).megabits()),
        Test::Requests => ask(&mut stream, limit),
        Test::DatagramsOut => {
            let Place::Network(host) = place else { panic!("datagrams need a network") };
            println!("{:.2}", send_datagrams(&mut stream, *host, limit).megabits());
        }
    }
}

/// Writes for `limit`, and then closes this direction.
fn send_all(stream: &mut File, limit: Duration) {
    let chunk = vec![0x5a; CHUNK];
    let started = Instant::now();
    while started.elapsed() < limit {
        stream.write_all(&chunk).unwrap();
    }
    end_writing(stream).unwrap();
}

fn take_all(stream: &mut File) -> Arrived {
    let mut chunk = vec![0; CHUNK];
    let mut bytes = 0;
    let mut started = None;
    loop {
        let length = stream.read(&mut chunk).unwrap();
        let started = *started.get_or_insert_with(Instant::now);
        bytes += length as u64;
        if length == 0 {
            return Arrived { bytes, time: started.elapsed() };
        }
    }
}

/// Sends every byte back until the client closes its side.
fn echo(stream: &mut File) {
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 {
        stream.write_all(&byte).unwrap();
    }
}

fn ask(stream: &mut File, limit: Duration) {
    let mut byte = [0];
    let printed = transactions(limit, || {
        stream.write_all(&byte).unwrap();
        stream.read_exact(&mut byte).unwrap();
    });
    println!("{printed}");
}

fn send_datagrams(stream: &mut File, host: Ipv4Addr, limit: Duration) -> Arrived {
    let port = u16::try_from(number(stream)).unwrap();
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.connect((host, port)).unwrap();
    let started = Instant::now();
    while started.elapsed() < limit {
        // Reading the clock has a cost, too.
        for _ in 0..16 {
            // A full queue drops the datagram. Only what arrives counts.
            let _ = socket.send(&[0x5a; DATAGRAM]);
        }
    }
    end_writing(stream).unwrap();
    Arrived::receive(stream)
}

/// Counts datagrams until the client has closed its side and the last one must have arrived.
fn take_datagrams(stream: &mut File) {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.set_read_timeout(Some(STRAGGLER)).unwrap();
    let port = u64::from(socket.local_addr().unwrap().port());
    stream.write_all(&port.to_le_bytes()).unwrap();
    let mut arrived = Arrived { bytes: 0, time: Duration::ZERO };
    let (mut datagram, mut first) = ([0; DATAGRAM], None);
    let closed = stream.try_clone().unwrap();
    let closed = thread::spawn(move || (&closed).read(&mut [0]).unwrap());
    loop {
        match socket.recv(&mut datagram) {
            Ok(length) => {
                let first = *first.get_or_insert_with(Instant::now);
                arrived = Arrived { bytes: arrived.bytes + length as u64, time: first.elapsed() };
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if closed.is_finished() {
                    return arrived.send(stream);
                }
            }
            Err(error) => panic!("datagrams: {error}"),
        }
    }
}

fn number(stream: &mut File) -> u64 {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}
