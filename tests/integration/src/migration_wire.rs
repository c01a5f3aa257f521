//! Connections between both sides of a live migration, through a test, which forwards frames, and stops some of them
//! until it has decided what happens. Tests of the API include this file as well.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

/// The bytes with which a connection starts, and with which the target replies to the first.
const GREETING: usize = 40;
/// A frame's header: its kind in 2 bytes, 2 of zero, the length of the rest in 4.
const HEADER: usize = 8;
/// Time limit for the awaited frame.
const PATIENCE: Duration = Duration::from_secs(120);

/// A side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Side that has the guest.
    Source,
    /// Side that gets the guest.
    Target,
}

/// A frame, or the greeting before all frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// The greeting of a side.
    Greeting(Side),
    /// A frame of this kind, after this number of frames of the kind on its connection.
    Frame(u16, usize),
}

impl Point {
    /// All points before which a migration can end with the guest at the source, in their order: both greetings, Offer,
    /// Prepared, the first Pages, the Flush of the first pass and of the second, State, Ready.
    pub const BEFORE_GO: [Self; 9] = [
        Self::Greeting(Side::Source),
        Self::Greeting(Side::Target),
        Self::Frame(1, 0),
        Self::Frame(2, 0),
        Self::Frame(3, 0),
        Self::Frame(4, 0),
        Self::Frame(4, 1),
        Self::Frame(5, 0),
        Self::READY,
    ];
    /// The target has everything, and the guest is paused.
    pub const READY: Self = Self::Frame(6, 0);
    /// The guest is handed to the target.
    pub const GO: Self = Self::Frame(7, 0);
    /// The target runs the guest.
    pub const RUNNING: Self = Self::Frame(8, 0);
}

/// Fate of an awaited frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The frame passes, with all that follow.
    Passes,
    /// The frame is lost, and all connections with it.
    IsCut,
    /// The frame is truncated: its first bytes arrive, and then all connections are lost.
    IsHalf,
}

/// A relay of a migration's connections.
pub struct Wire {
    reached: Receiver<()>,
    then: Sender<Then>,
    all: Arc<Mutex<Vec<UnixStream>>>,
    is_over: Arc<AtomicBool>,
    path: PathBuf,
}

/// State that the forwarding threads share.
#[derive(Clone)]
struct Middle {
    points: Vec<Point>,
    tell: Sender<()>,
    verdicts: Arc<Mutex<Receiver<Then>>>,
    all: Arc<Mutex<Vec<UnixStream>>>,
    /// The most bytes per second that each connection forwards in each direction.
    rate: Option<usize>,
}

/// Number of times per second that a slow connection forwards its share of the rate.
const PARTS: usize = 50;

impl Wire {
    /// Listens at `path` for a source, whose target is at `target`. The frames at `points`, in order, are held until
    /// [`Self::goes`] is called.
    pub fn new(path: &Path, target: &Path, points: &[Point]) -> Self {
        Self::with(path, target, points, None)
    }

    /// As [`Self::new`], over a network with a rate of `rate` bytes per second for each connection.
    pub fn slow(path: &Path, target: &Path, points: &[Point], rate: usize) -> Self {
        Self::with(path, target, points, Some(rate))
    }

    fn with(path: &Path, target: &Path, points: &[Point], rate: Option<usize>) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (tell, reached) = channel();
        let (then, verdict) = channel();
        let all = Arc::new(Mutex::new(Vec::new()));
        let (points, verdicts) = (points.to_vec(), Arc::new(Mutex::new(verdict)));
        let middle = Middle { points, tell, verdicts, all: Arc::clone(&all), rate };
        let target = target.to_path_buf();
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        thread::spawn(move || {
            for source in listener.incoming().flatten() {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                if let Ok(target) = UnixStream::connect(&target) {
                    middle.clone().connect(source, target);
                }
            }
        });
        Self { reached, then, all, is_over, path: path.to_path_buf() }
    }

    /// Waits for the next frame of `points`.
    pub fn reaches(&self) {
        self.reached.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("the frame never came: {error}"));
    }

    /// Decides the fate of the held frame.
    pub fn goes(&self, then: Then) {
        // If no thread waits for this, the connection has ended in the meantime.
        let _ = self.then.send(then);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // Wakes the listening thread.
        let _ = UnixStream::connect(&self.path);
        close(&self.all);
        let _ = std::fs::remove_file(&self.path);
    }
}

fn close(all: &Mutex<Vec<UnixStream>>) {
    for stream in all.lock().iter() {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl Middle {
    fn connect(self, source: UnixStream, target: UnixStream) {
        let copy = |stream: &UnixStream| stream.try_clone().unwrap();
        self.all.lock().extend([copy(&source), copy(&target)]);
        let (back, forth) = (self.clone(), self);
        let (from_target, to_source) = (copy(&target), copy(&source));
        thread::spawn(move || back.pass(from_target, to_source, Side::Target));
        thread::spawn(move || forth.pass(source, target, Side::Source));
    }

    /// Forwards the data from `from` until one side ends.
    fn pass(self, mut from: UnixStream, mut to: UnixStream, side: Side) {
        let passed = self.pass_all(&mut from, &mut to, side);
        if passed.is_err() {
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        }
    }

    fn pass_all(&self, from: &mut UnixStream, to: &mut UnixStream, side: Side) -> io::Result<()> {
        let mut greeting = vec![0; GREETING];
        from.read_exact(&mut greeting)?;
        // The connections for pages follow the first.
        let is_first = greeting.get(12) == Some(&0);
        self.look(is_first && self.points.contains(&Point::Greeting(side)), &greeting, to)?;
        let mut seen = [0_usize; 12];
        loop {
            let mut frame = vec![0; HEADER];
            from.read_exact(&mut frame)?;
            let (kind, len) = (u16::from(frame[0]), u32::from_le_bytes([frame[4], frame[5], frame[6], frame[7]]));
            frame.resize(HEADER + len as usize, 0);
            from.read_exact(&mut frame[HEADER..])?;
            let count = seen.get_mut(usize::from(kind)).ok_or(io::ErrorKind::InvalidData)?;
            let is_it = self.points.contains(&Point::Frame(kind, *count));
            *count += 1;
            self.look(is_it, &frame, to)?;
        }
    }

    fn write(&self, frame: &[u8], to: &mut UnixStream) -> io::Result<()> {
        let Some(rate) = self.rate else { return to.write_all(frame) };
        frame.chunks((rate / PARTS).max(1)).try_for_each(|part| {
            thread::sleep(Duration::from_secs(1) / PARTS as u32);
            to.write_all(part)
        })
    }

    /// Forwards a frame. If it is an awaited one, waits for the test's decision.
    fn look(&self, is_it: bool, frame: &[u8], to: &mut UnixStream) -> io::Result<()> {
        if !is_it {
            return self.write(frame, to);
        }
        let _ = self.tell.send(());
        let verdict = self.verdicts.lock().recv();
        match verdict {
            Ok(Then::Passes) => to.write_all(frame),
            Ok(Then::IsHalf) => {
                let _ = to.write_all(&frame[..frame.len() / 2]);
                close(&self.all);
                Err(io::ErrorKind::ConnectionAborted.into())
            }
            Ok(Then::IsCut) | Err(_) => {
                close(&self.all);
                Err(io::ErrorKind::ConnectionAborted.into())
            }
        }
    }
}
