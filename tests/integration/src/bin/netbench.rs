//! Measures throughput and latency between two addresses: both ends of the measurement of `cargo xtask bench`.
//!
//! One static program without dependencies, so that a guest and its host measure with the same code. `netbench
//! server` serves until killed; `netbench client HOST TEST SECONDS` measures once and prints one line:
//!
//! | test | prints |
//! |---|---|
//! | `tcp-out` | Mbit/s that reached the server |
//! | `tcp-in` | Mbit/s that reached the client |
//! | `tcp-rr` | one-byte transactions per second, and the 99th percentile of their duration in us |
//! | `udp-out` | Mbit/s of datagrams of 64 bytes that reached the server |

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed measurement panics and says where")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

/// The server's port.
const PORT: u16 = 5909;
/// Bytes per write in the bulk tests.
const CHUNK: usize = 128 * 1024;
/// Bytes per datagram.
const DATAGRAM: usize = 64;
/// Transactions that do not count: after these, addresses are resolved and caches are warm.
const WARM_UP: usize = 100;
/// How long after the last one was sent a datagram may arrive.
const STRAGGLER: Duration = Duration::from_millis(100);

/// What to measure. The client sends the server this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    TcpOut = 1,
    TcpIn = 2,
    TcpRequests = 3,
    UdpOut = 4,
}

impl Test {
    const ALL: [(&str, Test); 4] =
        [("tcp-out", Test::TcpOut), ("tcp-in", Test::TcpIn), ("tcp-rr", Test::TcpRequests), ("udp-out", Test::UdpOut)];

    fn by_number(number: u8) -> Option<Test> {
        Test::ALL.iter().map(|(_, test)| *test).find(|test| *test as u8 == number)
    }
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

    fn send(&self, stream: &mut TcpStream) {
        let nanoseconds = u64::try_from(self.time.as_nanos()).unwrap();
        stream.write_all(&[self.bytes.to_le_bytes(), nanoseconds.to_le_bytes()].concat()).unwrap();
    }

    fn receive(stream: &mut TcpStream) -> Arrived {
        let bytes = number(stream);
        Arrived { bytes, time: Duration::from_nanos(number(stream)) }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["server"] => serve(),
        ["client", host, test, seconds] => {
            let (_, test) = Test::ALL.into_iter().find(|(name, _)| name == test).unwrap();
            measure(host.parse().unwrap(), test, Duration::from_secs_f64(seconds.parse().unwrap()));
        }
        _ => panic!("usage: netbench server | netbench client HOST TEST SECONDS"),
    }
}

/// Serves clients until killed.
fn serve() {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap();
    println!("ready");
    for stream in listener.incoming() {
        thread::spawn(|| answer(stream.unwrap()));
    }
}

fn answer(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut kind = [0];
    stream.read_exact(&mut kind).unwrap();
    let limit = Duration::from_nanos(number(&mut stream));
    match Test::by_number(kind[0]).unwrap() {
        Test::TcpOut => take_all(&mut stream).send(&mut stream),
        Test::TcpIn => send_all(&mut stream, limit),
        Test::TcpRequests => echo(&mut stream),
        Test::UdpOut => take_datagrams(&mut stream),
    }
}

/// Runs `test` for `limit` against the server at `host`, and prints the result.
fn measure(host: Ipv4Addr, test: Test, limit: Duration) {
    let mut stream = TcpStream::connect(SocketAddr::from((host, PORT))).unwrap();
    stream.set_nodelay(true).unwrap();
    let nanoseconds = u64::try_from(limit.as_nanos()).unwrap();
    stream.write_all(&[&[test as u8][..], &nanoseconds.to_le_bytes()].concat()).unwrap();
    match test {
        Test::TcpOut => {
            send_all(&mut stream, limit);
            println!("{:.1}", Arrived::receive(&mut stream).megabits());
        }
        Test::TcpIn => println!("{:.1}", take_all(&mut stream).megabits()),
        Test::TcpRequests => ask(&mut stream, limit),
        Test::UdpOut => println!("{:.2}", send_datagrams(&mut stream, host, limit).megabits()),
    }
}

/// Writes for `limit`, and then closes this direction.
fn send_all(stream: &mut TcpStream, limit: Duration) {
    let chunk = vec![0x5a; CHUNK];
    let started = Instant::now();
    while started.elapsed() < limit {
        stream.write_all(&chunk).unwrap();
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

fn take_all(stream: &mut TcpStream) -> Arrived {
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
fn echo(stream: &mut TcpStream) {
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 {
        stream.write_all(&byte).unwrap();
    }
}

fn ask(stream: &mut TcpStream, limit: Duration) {
    let mut byte = [0];
    let mut transact = || {
        stream.write_all(&byte).unwrap();
        stream.read_exact(&mut byte).unwrap();
    };
    (0..WARM_UP).for_each(|_| transact());
    let mut times = Vec::new();
    let started = Instant::now();
    let mut last = Duration::ZERO;
    while last < limit {
        transact();
        let now = started.elapsed();
        times.push(now - last);
        last = now;
    }
    times.sort_unstable();
    let slow = times[times.len() * 99 / 100];
    println!("{:.1} {:.1}", times.len() as f64 / last.as_secs_f64(), slow.as_secs_f64() * 1e6);
}

fn send_datagrams(stream: &mut TcpStream, host: Ipv4Addr, limit: Duration) -> Arrived {
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
    stream.shutdown(Shutdown::Write).unwrap();
    Arrived::receive(stream)
}

/// Counts datagrams until the client has closed its side and the last one must have arrived.
fn take_datagrams(stream: &mut TcpStream) {
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

fn number(stream: &mut TcpStream) -> u64 {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}
