//! Failing peers of a live migration, each at one point.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vmm::migration::incoming::{Incoming, Item};
use vmm::migration::wire::{Features, Frame, Greeting, HEADER, Header, Kind, OLDEST, Part, Role, VERSION};

/// The point at which a target fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// Closes the connection instead of greeting.
    BeforeGreeting,
    /// Is another program.
    Foreign,
    /// Greets and closes.
    AfterGreeting,
    /// Greets and sends half a frame.
    HalfAFrame,
    /// Sends a frame that is too long.
    TooLong,
    /// Sends a frame out of order.
    RunsAtOnce,
    /// Cannot create the VM.
    FailsToPrepare,
    /// Never reports that it has created its VM.
    NeverPrepares,
    /// Takes pages slowly, and finally runs the guest.
    Slow,
    /// Closes while receiving pages.
    DuringPages,
    /// Closes after receiving the state.
    AfterState,
    /// Cannot load the state.
    FailsToLoad,
    /// Sends Ready, gets Go, and closes.
    DiesAfterGo,
    /// Gets Go, and returns the guest.
    FailsAfterGo,
    /// The same, once allowed ([`Target::go_on`]).
    WaitsAfterGo,
}

impl Ends {
    /// Points after which the source resumes by itself.
    pub(crate) const BEFORE_GO: [Self; 10] = [
        Self::BeforeGreeting,
        Self::Foreign,
        Self::AfterGreeting,
        Self::HalfAFrame,
        Self::TooLong,
        Self::RunsAtOnce,
        Self::FailsToPrepare,
        Self::DuringPages,
        Self::AfterState,
        Self::FailsToLoad,
    ];
}

/// A target.
pub(crate) struct Target {
    cancelled: Arc<AtomicBool>,
    goes_on: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Target {
    /// Starts a target that listens at `path` for a single source.
    pub(crate) fn listen(path: &Path, ends: Ends) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let (cancelled, goes_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (told, may_go_on) = (Arc::clone(&cancelled), Arc::clone(&goes_on));
        let thread = thread::spawn(move || serve(&listener, ends, &told, &may_go_on));
        Self { cancelled, goes_on, thread: Some(thread) }
    }

    /// Lets a waiting target continue.
    pub(crate) fn go_on(&self) {
        self.goes_on.store(true, Ordering::SeqCst);
    }

    /// True if the source finally reported that it was cancelled.
    pub(crate) fn was_told_of_cancel(mut self) -> bool {
        self.thread.take().unwrap().join().unwrap();
        self.cancelled.load(Ordering::SeqCst)
    }
}

fn serve(listener: &UnixListener, ends: Ends, cancelled: &AtomicBool, goes_on: &AtomicBool) {
    let (control, _) = listener.accept().unwrap();
    let mut incoming = Incoming::new(&control);
    let greeting = incoming.greeting().unwrap();
    let say = |bytes: &[u8]| _ = (&control).write_all(bytes);
    let tell = |frame: Frame| say(&frame.bytes());
    match ends {
        Ends::BeforeGreeting => return,
        Ends::Foreign => return say(&[1; 64]),
        _ => say(&greeting.bytes()),
    }
    if ends == Ends::AfterGreeting {
        return;
    }
    let (pages, _) = listener.accept().unwrap();
    match ends {
        Ends::HalfAFrame => return say(&Frame::Failed("half".into()).bytes()[..9]),
        Ends::TooLong => return say(&[Kind::Failed as u16 as u8, 0, 0, 0, 255, 255, 255, 255]),
        Ends::RunsAtOnce => return tell(Frame::Running(1)),
        _ => {}
    }
    let reads = thread::spawn(move || drain(pages, ends));
    while let Ok(Item::Frame(frame)) = incoming.receive() {
        match (frame, ends) {
            (Frame::Keepalive, Ends::Slow) => tell(Frame::Keepalive),
            (Frame::Cancel, _) => cancelled.store(true, Ordering::SeqCst),
            (Frame::Offer(Part { is_last: true, .. }), Ends::FailsToPrepare) => {
                tell(Frame::Failed("no tap here".into()))
            }
            (Frame::Offer(Part { is_last: true, .. }), Ends::NeverPrepares) => {}
            (Frame::Offer(Part { is_last: true, .. }), _) => tell(Frame::Prepared),
            (Frame::State(Part { is_last: true, .. }), Ends::AfterState) => break,
            (Frame::State(Part { is_last: true, .. }), Ends::FailsToLoad) => tell(Frame::Failed("no such MSR".into())),
            (Frame::State(Part { is_last: true, .. }), _) => tell(Frame::Ready),
            (Frame::Go(_), Ends::FailsAfterGo) => tell(Frame::Failed("the lock of disk0 is another's".into())),
            (Frame::Go(_), Ends::WaitsAfterGo) => {
                while !goes_on.load(Ordering::SeqCst) {
                    thread::sleep(std::time::Duration::from_millis(5));
                }
                tell(Frame::Failed("the lock of disk0 is another's".into()));
            }
            (Frame::Go(_), Ends::Slow) => tell(Frame::Running(1)),
            (Frame::Go(_), _) => break,
            _ => {}
        }
    }
    let _ = control.shutdown(std::net::Shutdown::Both);
    reads.join().unwrap();
}

/// Reads the pages: all of them, only the beginning, or slowly (some 20 MB/s).
fn drain(mut pages: UnixStream, ends: Ends) {
    let mut bytes = vec![0; 64 << 10];
    while pages.read(&mut bytes).is_ok_and(|count| count > 0) && ends != Ends::DuringPages {
        if ends == Ends::Slow {
            thread::sleep(std::time::Duration::from_millis(3));
        }
    }
}

fn greet(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    let features = Features::default();
    let greeting =
        Greeting { version: VERSION, oldest: OLDEST, role: Role::Control, connections: 1, features, session: [3; 16] };
    stream.write_all(&greeting.bytes()).unwrap();
    let mut answer = [0; vmm::migration::wire::GREETING];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(Greeting::read(&answer).unwrap().version, VERSION);
    stream
}

/// A source that sends this offer, and waits for the reply.
pub(crate) fn offer(path: &Path, offer: &[u8]) {
    let mut stream = greet(path);
    stream.write_all(&Frame::Offer(Part { is_last: true, bytes: offer.to_vec() }).bytes()).unwrap();
    let mut incoming = Incoming::new(&stream);
    let Ok(Item::Frame(Frame::Failed(line))) = incoming.receive() else { panic!("it was taken") };
    assert!(line.contains("the source's offer"), "{line}");
}

/// A source that dies in the middle of a frame.
pub(crate) fn half_a_frame(path: &Path) {
    let mut stream = greet(path);
    let header = Header { kind: Kind::Offer, len: 1000 };
    stream.write_all(&[&header.bytes()[..HEADER], &[0; 100]].concat()).unwrap();
}
