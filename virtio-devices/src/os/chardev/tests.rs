//! Both ends of a console.

use std::io::{PipeReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::time::Instant;

use rustix::fs::{CWD, Mode, mknodat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen};
use rustix::termios::{LocalModes, tcgetattr};

use super::*;

/// The next input within a few seconds.
fn input(device: &CharDevice) -> Vec<u8> {
    let mut bytes = [0; 64];
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        device.wait([], true).unwrap();
        match device.read(&mut bytes) {
            Ok(len) => return bytes[..len].to_vec(),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
    }
    panic!("no input came");
}

fn piped() -> (CharDevice, PipeReader) {
    let (reader, writer) = io::pipe().unwrap();
    (CharDevice::over(None, writer.into()).unwrap(), reader)
}

#[test]
fn nowhere_takes_everything_and_gives_nothing() {
    let device = CharDevice::open(&CharSpec::Null).unwrap();
    device.write(&[b'x'; 100_000]);
    assert_eq!(device.read(&mut [0; 8]).unwrap(), 0);
    assert!(device.pty().is_none());
}

#[test]
fn output_is_appended_to_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    std::fs::write(&path, "of an earlier start\n").unwrap();
    let device = CharDevice::open(&CharSpec::File(path.clone())).unwrap();
    device.write(b"hello ");
    device.write(b"world");
    assert_eq!(std::fs::read(&path).unwrap(), b"of an earlier start\nhello world");
    let error = CharDevice::open(&CharSpec::File(path.join("below a file"))).unwrap_err().to_string();
    assert!(error.starts_with("file=") && !error.contains('\n'), "{error}");
}

/// Opens `spec`, which must not block.
fn open_at_once(spec: CharSpec) -> Result<CharDevice, CharError> {
    let opening = std::thread::spawn(move || CharDevice::open(&spec));
    let start = Instant::now();
    while !opening.is_finished() {
        assert!(start.elapsed() < PATIENCE, "opening waits for the other end");
        std::thread::sleep(Duration::from_millis(1));
    }
    opening.join().unwrap()
}

#[test]
fn a_fifo_without_a_reader_delays_no_start_and_delivers_later() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("fifo");
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let device = open_at_once(CharSpec::File(path.clone())).unwrap().with_patience(Duration::from_millis(100));
    for word in [b"one", b"two"] {
        // A reader that disconnects between the two changes nothing.
        device.write(word);
        let mut bytes = [0; 3];
        File::open(&path).unwrap().read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, word);
    }
    let start = Instant::now();
    device.write(&[b'x'; 300_000]);
    (0..1000).for_each(|_| device.write(b"y"));
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn unread_output_is_dropped_after_one_wait_until_it_is_read() {
    let (device, mut reader) = piped();
    let device = device.with_patience(Duration::from_millis(100));
    let start = Instant::now();
    device.write(&[b'x'; 300_000]);
    assert!(start.elapsed() >= Duration::from_millis(100));
    (0..1000).for_each(|_| device.write(b"y"));
    assert!(start.elapsed() < PATIENCE);
    let mut bytes = vec![0; 300_000];
    let taken = reader.read(&mut bytes).unwrap();
    assert!(taken < bytes.len() && bytes[..taken].iter().all(|byte| *byte == b'x'));
    device.write(b"!");
    assert_eq!(reader.read(&mut bytes).unwrap(), 1);
    assert_eq!(bytes[0], b'!');
}

#[test]
fn input_of_a_stream_has_an_end() {
    let (reader, mut writer) = io::pipe().unwrap();
    let (_output, sink) = io::pipe().unwrap();
    let device = CharDevice::over(Some(reader.into()), sink.into()).unwrap();
    writer.write_all(b"abc").unwrap();
    assert_eq!(input(&device), b"abc");
    drop(writer);
    assert_eq!(input(&device), b"");
}

#[test]
fn input_that_has_not_come_is_not_waited_for() {
    let (reader, writer) = io::pipe().unwrap();
    let (_output, sink) = io::pipe().unwrap();
    let device = CharDevice::over(Some(reader.into()), sink.into()).unwrap();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| device.read(&mut [0; 8]));
        let start = Instant::now();
        while !reading.is_finished() && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A blocked read ends with its input, as `Ok(0)`.
        drop(writer);
        assert_eq!(reading.join().unwrap().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    });
}

#[test]
fn a_wait_ends_for_others_without_touching_unrequested_input() {
    let (reader, mut writer) = io::pipe().unwrap();
    let (other, mut wake) = io::pipe().unwrap();
    let (_output, sink) = io::pipe().unwrap();
    let device = CharDevice::over(Some(reader.into()), sink.into()).unwrap();
    writer.write_all(b"abc").unwrap();
    wake.write_all(b"x").unwrap();
    assert_eq!(device.wait([other.as_fd()], false).unwrap(), Woken { others: [true], input: false });
    assert_eq!(device.wait([other.as_fd()], true).unwrap(), Woken { others: [true], input: true });
}

#[test]
fn a_pty_is_raw_and_keeps_output_until_it_is_opened() {
    let device = CharDevice::open(&CharSpec::Pty).unwrap();
    let path = device.pty().unwrap().to_owned();
    assert!(path.starts_with("/dev/pts"));
    for round in [b"one", b"two"] {
        let start = Instant::now();
        device.write(b"kept ");
        assert!(start.elapsed() < PATIENCE);
        assert_eq!(device.read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let mut user = File::options().read(true).write(true).open(&path).unwrap();
        assert!(!tcgetattr(&user).unwrap().local_modes.intersects(LocalModes::ECHO | LocalModes::ICANON));
        device.write(b"\x03\n");
        device.write(round);
        let mut seen = [0; 10];
        user.read_exact(&mut seen).unwrap();
        assert_eq!(seen, [&b"kept \x03\n"[..], round].concat()[..]);
        user.write_all(b"\x03\r").unwrap();
        assert_eq!(input(&device), b"\x03\r");
    }
}

#[test]
fn input_written_to_a_pty_before_its_close_is_read() {
    let device = CharDevice::open(&CharSpec::Pty).unwrap();
    let mut user = File::options().write(true).open(device.pty().unwrap()).unwrap();
    user.write_all(b"bye").unwrap();
    drop(user);
    assert_eq!(input(&device), b"bye");
}

#[test]
fn a_pty_that_is_not_open_is_polled_slowly() {
    let device = CharDevice::open(&CharSpec::Pty).unwrap();
    let start = Instant::now();
    assert_eq!(device.wait([], true).unwrap(), Woken { others: [], input: false });
    assert!(start.elapsed() >= Duration::from_millis(250));
}

#[test]
fn a_socket_has_one_client_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let device = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    let mut first = UnixStream::connect(&path).unwrap();
    let mut second = UnixStream::connect(&path).unwrap();
    device.write(b"hello");
    let mut bytes = [0; 5];
    first.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    first.write_all(b"abc").unwrap();
    second.write_all(b"def").unwrap();
    assert_eq!(input(&device), b"abc");
    drop(first);
    assert_eq!(input(&device), b"def");
    device.write(b"again");
    second.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"again");
}

#[test]
fn output_between_two_clients_is_kept_for_the_second() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let device = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    let first = UnixStream::connect(&path).unwrap();
    device.write(b"x");
    // A child that another test spawns may hold the client's socket for a moment.
    first.shutdown(Shutdown::Both).unwrap();
    drop(first);
    device.write(b"kept");
    let mut second = UnixStream::connect(&path).unwrap();
    device.write(b" too");
    let mut bytes = [0; 8];
    second.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"kept too");
}

/// Output that a reader gets if it opens the other end after `output` was written, while a thread waits as a console's
/// does, and nothing else is written.
fn read_later(device: &CharDevice, output: &[u8], open: impl FnOnce() -> Box<dyn Read>) -> Vec<u8> {
    output.chunks(5000).for_each(|part| device.write(part));
    let (wake, waker) = io::pipe().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            // There is no room for input, as in a serial port that the guest does not read.
            while device.wait([wake.as_fd()], false).unwrap().others == [false] {}
        });
        let mut bytes = vec![0; output.len().min(backlog::CAPACITY)];
        open().read_exact(&mut bytes).unwrap();
        drop(waker);
        waiting.join().unwrap();
        bytes
    })
}

#[test]
fn a_late_reader_gets_the_latest_mib_of_unread_output() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let pty = CharDevice::open(&CharSpec::Pty).unwrap();
    let socket = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    let output: Vec<u8> = (0..backlog::CAPACITY + 4321).map(|n| (n % 251) as u8).collect();
    let expected = &output[4321..];
    assert!(read_later(&socket, &output, || Box::new(UnixStream::connect(&path).unwrap())) == expected);
    let other_end = pty.pty().unwrap().to_owned();
    assert!(read_later(&pty, &output, || Box::new(File::open(other_end).unwrap())) == expected);
}

#[test]
fn a_client_that_takes_nothing_for_a_while_misses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let device = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap().with_patience(Duration::from_millis(50));
    let mut client = UnixStream::connect(&path).unwrap();
    let output: Vec<u8> = (0..900_000).map(|n| (n % 251) as u8).collect();
    assert!(read_later(&device, &output, || Box::new(client.try_clone().unwrap())) == output);
    device.write(b"!");
    let mut byte = [0];
    client.read_exact(&mut byte).unwrap();
    assert_eq!(byte, *b"!");
}

#[test]
fn only_a_stale_socket_is_replaced_and_it_is_removed_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    drop(UnixListener::bind(&path).unwrap());
    let device = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    let refused = |path: &Path| CharDevice::open(&CharSpec::Socket(path.into())).unwrap_err();
    assert!(matches!(refused(&path), CharError::SocketInUse(_)));
    drop(device);
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(refused(&path), CharError::NotASocket(_)));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let long = directory.path().join("x".repeat(200));
    let error = refused(&long).to_string();
    assert!(error.contains("a socket's path has at most 107") && !error.contains('\n'), "{error}");
}

#[test]
fn a_socket_of_another_type_or_too_busy_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("datagrams");
    let _datagrams = UnixDatagram::bind(&path).unwrap();
    assert!(matches!(open_at_once(CharSpec::Socket(path.clone())), Err(CharError::SocketInUse(_))));
    assert!(path.exists());
    let path = directory.path().join("busy");
    let busy = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&busy, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&busy, 0).unwrap();
    let _waiting = UnixStream::connect(&path).unwrap();
    assert!(matches!(open_at_once(CharSpec::Socket(path.clone())), Err(CharError::SocketInUse(_))));
    assert!(path.exists());
}

#[test]
fn a_file_that_took_the_place_of_a_socket_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let device = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    std::fs::remove_file(&path).unwrap();
    let next = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    drop(device);
    UnixStream::connect(&path).unwrap();
    drop(next);
    assert!(!path.exists());
}

#[test]
fn a_client_accepted_by_output_is_read_by_a_waiting_reader() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let device = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    let (wake, mut waker) = io::pipe().unwrap();
    for _ in 0..50 {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut bytes = [0; 8];
                loop {
                    let woken = device.wait([wake.as_fd()], true).unwrap();
                    match device.read(&mut bytes) {
                        Ok(len) => return bytes[..len].to_vec(),
                        Err(_) if woken.others == [true] => return b"nothing".to_vec(),
                        Err(_) => {}
                    }
                }
            });
            let mut client = UnixStream::connect(&path).unwrap();
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            device.write(b"prompt");
            let mut bytes = [0; 6];
            client.read_exact(&mut bytes).unwrap();
            client.write_all(b"answer").unwrap();
            let start = Instant::now();
            while !waiting.is_finished() && start.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !waiting.is_finished() {
                waker.write_all(b"x").unwrap();
            }
            assert_eq!(waiting.join().unwrap(), b"answer");
            client.shutdown(Shutdown::Both).unwrap();
        });
        // The next read or write notices the disconnect.
        assert!(device.read(&mut [0; 8]).is_err());
    }
}

#[test]
fn a_client_that_cannot_be_let_in_is_tried_again_without_haste() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let device = CharDevice::open(&CharSpec::Socket(path.clone())).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"x").unwrap();
    let Kind::Socket(socket) = &device.kind else { panic!("it is a socket") };
    // As after a failed accept: exhausting the process's descriptors would make other tests fail.
    socket.short.store(true, Ordering::Relaxed);
    let start = Instant::now();
    assert!(!device.wait([], true).unwrap().input);
    assert!(start.elapsed() >= Duration::from_millis(250));
    assert_eq!(input(&device), b"x");
}
