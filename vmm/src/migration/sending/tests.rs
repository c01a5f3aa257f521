//! The source's thread with targets that fail.

use std::io::Read as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vm_api::migration::MigrationRole;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::dirty::PageSet;
use crate::migration::handover::Outcome;
use crate::migration::incoming::{Incoming, Item};
use crate::migration::orders::{self, Orders, Stopped};

/// Guest memory in bytes.
const MEMORY: usize = 8 << 20;

fn memory() -> GuestMap {
    let memory = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    memory.write_slice(&vec![0xa5; MEMORY], GuestAddress(0)).unwrap();
    memory
}

/// Parameters of a migration to the socket in `folder`, with these options.
fn job(folder: &Path, options: &str) -> (SendJob, Orders<SourceOrder>) {
    let url = format!("unix:{}", folder.join("socket").display());
    let config: SendMigration = format!("destination_url={url},{options}").parse().unwrap();
    let (control, orders) = orders::pair().unwrap();
    let job = SendJob {
        address: Address::parse("destination_url", &url).unwrap(),
        config,
        tls: None,
        offer: b"{}".to_vec(),
        passed: None,
        memory: memory(),
        discarded: Discarded::default(),
        progress: Progress::new(MigrationRole::Sender, "connecting"),
        control,
    };
    (job, orders)
}

/// Writer that has written all of memory again when the guest is paused.
struct Writes {
    collected: usize,
}

impl DirtySource for Writes {
    fn name(&self) -> &'static str {
        "the test writes"
    }

    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        self.collected += 1;
        if self.collected > 1 {
            *pages = PageSet::all(&memory());
        }
        Ok(())
    }

    fn stop(&mut self) {}
}

/// A target that greets after `rtt`, creates any VM, sends keepalives, and receives pages slowly once `is_slow`.
fn serve(listener: &UnixListener, rtt: Duration, is_slow: &AtomicBool) {
    let (control, _) = listener.accept().unwrap();
    let mut incoming = Incoming::new(&control);
    let greeting = incoming.greeting().unwrap();
    let say = |bytes: &[u8]| _ = io::Write::write_all(&mut &control, bytes);
    thread::sleep(rtt);
    say(&greeting.bytes());
    let (pages, _) = listener.accept().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| drain(&pages, is_slow));
        while let Ok(Item::Frame(frame)) = incoming.receive() {
            match frame.kind() {
                Kind::Keepalive => say(&Frame::Keepalive.bytes()),
                Kind::Offer => say(&Frame::Prepared.bytes()),
                _ => {}
            }
        }
    });
}

fn drain(mut pages: &UnixStream, is_slow: &AtomicBool) {
    let mut bytes = vec![0; 16 << 10];
    while pages.read(&mut bytes).is_ok_and(|count| count > 0) {
        if is_slow.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Requests to the control thread, and the final report.
#[derive(Debug, Default)]
struct Ordered {
    stopped: bool,
    resumed: bool,
    end: Option<(Outcome, String)>,
}

/// Runs the control thread until the migration is over.
fn control(sending: &Sending, orders: &Orders<SourceOrder>, is_slow: &AtomicBool) -> Ordered {
    let mut ordered = Ordered::default();
    let until = Instant::now() + Duration::from_secs(60);
    while ordered.end.is_none() {
        assert!(Instant::now() < until, "{ordered:?}");
        match orders.take() {
            Some(SourceOrder::FindWriters) => {
                let writers: Vec<Box<dyn DirtySource>> = vec![Box::new(Writes { collected: 0 })];
                sending.tell(SourceNote::Writers(Ok(writers), Holds::default(), 1));
            }
            Some(SourceOrder::Stop) => {
                ordered.stopped = true;
                is_slow.store(true, Ordering::SeqCst);
                let machine = include_str!("../../vm/saved/golden/machine_state-1.json");
                let machine = Box::new(serde_json::from_str(machine).unwrap());
                let (holds, stateful, stop) = (Holds::default(), Vec::new(), Duration::ZERO);
                sending.tell(SourceNote::Stopped(Ok(Stopped { machine, holds, stateful, stop })));
            }
            Some(SourceOrder::Resume) => ordered.resumed = true,
            Some(SourceOrder::Report(outcome, why)) => ordered.end = Some((outcome, why.unwrap_or_default())),
            Some(SourceOrder::GiveUp) => sending.tell(SourceNote::GivenUp(None)),
            Some(SourceOrder::Slow(_) | SourceOrder::Pass(_)) => {}
            None => thread::sleep(Duration::from_millis(2)),
        }
    }
    ordered
}

/// Result of a migration to a target that receives pages slowly, from the start or once the guest is paused.
fn sent_slowly(is_slow: bool, options: &str) -> (Ordered, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (job, orders) = job(folder.path(), options);
    let is_slow = AtomicBool::new(is_slow);
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, Duration::ZERO, &is_slow));
        let began = Instant::now();
        let sending = Sending::begin(job).unwrap();
        let ordered = control(&sending, &orders, &is_slow);
        (ordered, began.elapsed())
    })
}

#[test]
fn first_pass_longer_than_the_timeout_fails_the_migration() {
    let (ordered, took) = sent_slowly(true, "timeout_s=1");
    let (outcome, why) = ordered.end.unwrap();
    assert_eq!(outcome, Outcome::Failed);
    assert_eq!(why, "after timeout_s=1, the memory has not been copied once: the target takes it too slowly");
    assert!(!ordered.stopped && took < Duration::from_secs(30), "{took:?}");
}

#[test]
fn guest_paused_far_beyond_its_goal_resumes_at_the_source() {
    let (ordered, took) = sent_slowly(false, "downtime_ms=300");
    let (outcome, why) = ordered.end.unwrap();
    assert_eq!((outcome, ordered.resumed), (Outcome::Failed, true));
    assert_eq!(why, "the target or this host took too long (finishing)");
    assert!(ordered.stopped && took < Duration::from_secs(20), "{took:?}");
}

/// A listener at the socket of `folder` whose backlog is full.
fn full(folder: &Path) -> (UnixListener, UnixStream) {
    let path = folder.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    (listener, UnixStream::connect(&path).unwrap())
}

/// Cancels a migration. Returns its result, and the time until the end.
fn cancelled(sending: &Sending, orders: &Orders<SourceOrder>) -> (Outcome, String, Duration) {
    let began = Instant::now();
    sending.tell(SourceNote::Cancel);
    let (outcome, why) = control(sending, orders, &AtomicBool::new(false)).end.unwrap();
    (outcome, why, began.elapsed())
}

#[test]
fn a_cancel_is_heard_while_nobody_accepts_the_connection() {
    let folder = tempfile::tempdir().unwrap();
    let _full = full(folder.path());
    let (job, orders) = job(folder.path(), "downtime_ms=300");
    let sending = Sending::begin(job).unwrap();
    thread::sleep(Duration::from_millis(200));
    let (outcome, why, took) = cancelled(&sending, &orders);
    assert_eq!((outcome, why.as_str()), (Outcome::Cancelled, "it was ended (vm.cancel-migration)"));
    let began = Instant::now();
    drop(sending);
    assert!(took + began.elapsed() < Duration::from_secs(6), "{took:?}");
}

/// The target accepts no further connection while it receives keepalives.
#[test]
fn source_sends_keepalives_and_takes_a_cancel_while_connecting() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let (job, orders) = job(folder.path(), "downtime_ms=300");
    let sending = Sending::begin(job).unwrap();
    let (control, _) = listener.accept().unwrap();
    let _fills = UnixStream::connect(folder.path().join("socket")).unwrap();
    let mut incoming = Incoming::new(&control);
    let greeting = incoming.greeting().unwrap();
    io::Write::write_all(&mut &control, &greeting.bytes()).unwrap();
    control.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let Item::Frame(Frame::Keepalive) = incoming.receive().unwrap() else { panic!("no keepalive") };
    let (outcome, _, took) = cancelled(&sending, &orders);
    assert_eq!(outcome, Outcome::Cancelled);
    let said = std::iter::repeat_with(|| incoming.receive().unwrap())
        .find(|item| !matches!(item, Item::Frame(Frame::Keepalive)));
    assert!(matches!(said, Some(Item::Frame(Frame::Cancel))), "no cancel");
    let began = Instant::now();
    drop(sending);
    assert!(took + began.elapsed() < Duration::from_secs(6), "{took:?}");
}

#[test]
fn the_estimate_has_the_time_that_the_greeting_took() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (job, orders) = job(folder.path(), "downtime_ms=2000");
    let progress = job.progress.clone();
    let is_slow = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, Duration::from_millis(300), &is_slow));
        let sending = Sending::begin(job).unwrap();
        loop {
            match orders.take() {
                Some(SourceOrder::FindWriters) => {
                    let writers: Vec<Box<dyn DirtySource>> = vec![Box::new(Writes { collected: 0 })];
                    sending.tell(SourceNote::Writers(Ok(writers), Holds::default(), 5));
                }
                Some(SourceOrder::Stop) => break,
                Some(SourceOrder::Report(outcome, why)) => panic!("{outcome:?}: {why:?}"),
                _ => thread::sleep(Duration::from_millis(2)),
            }
        }
        // Two round trips, 10 ms for one function, 4 for 4 more.
        let estimate = progress.shown().estimated_downtime_ms.unwrap();
        assert!(estimate >= 614, "{estimate}");
    });
}

/// A backend whose dirty log starts slowly.
struct Hesitates {
    goes_on: Receiver<()>,
    stopped: Arc<AtomicBool>,
}

impl DirtySource for Hesitates {
    fn name(&self) -> &'static str {
        "the test hesitates"
    }

    fn start(&mut self) -> io::Result<()> {
        let _ = self.goes_on.recv_timeout(Duration::from_secs(30));
        Ok(())
    }

    fn collect(&mut self, _pages: &mut PageSet) -> io::Result<()> {
        Ok(())
    }

    fn stop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
    }
}

#[test]
fn cancel_while_backends_start_logging_waits_for_their_logs() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (job, orders) = job(folder.path(), "downtime_ms=300");
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let stopped = Arc::new(AtomicBool::new(false));
    let sending = Sending::begin(job).unwrap();
    let (target, _) = listener.accept().unwrap();
    let mut incoming = Incoming::new(&target);
    let greeting = incoming.greeting().unwrap();
    io::Write::write_all(&mut &target, &greeting.bytes()).unwrap();
    let _pages = listener.accept().unwrap();
    target.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut until = |is_it: fn(&Frame) -> bool| {
        std::iter::repeat_with(|| incoming.receive().unwrap())
            .find(|item| matches!(item, Item::Frame(frame) if is_it(frame)))
    };
    until(|frame| frame.kind() == Kind::Offer);
    io::Write::write_all(&mut &target, &Frame::Prepared.bytes()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !matches!(orders.take(), Some(SourceOrder::FindWriters)) {
        assert!(Instant::now() < deadline, "nobody asks who writes");
        thread::sleep(Duration::from_millis(2));
    }
    let writer = Hesitates { goes_on, stopped: Arc::clone(&stopped) };
    sending.tell(SourceNote::Writers(Ok(vec![Box::new(writer)]), Holds::default(), 1));
    sending.tell(SourceNote::Cancel);
    until(|frame| matches!(frame, Frame::Cancel));
    thread::sleep(Duration::from_millis(100));
    assert!(orders.take().is_none(), "it has not ended while a backend may begin to log");
    go_on.send(()).unwrap();
    let ordered = control(&sending, &orders, &AtomicBool::new(false));
    assert_eq!((ordered.end.unwrap().0, stopped.load(Ordering::SeqCst)), (Outcome::Cancelled, true));
}

/// The guest's writes to memory that is not sent would be lost.
#[test]
fn a_guest_that_writes_what_is_discarded_stays_at_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (mut job, orders) = job(folder.path(), "downtime_ms=300");
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let mapping = Arc::new(virtio_devices::FileMapping::new(&file, 1 << 20, true).unwrap());
    job.discarded.0.push(("--pmem id=p".to_string(), Arc::clone(&mapping)));
    let is_slow = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, Duration::ZERO, &is_slow));
        let sending = Sending::begin(job).unwrap();
        loop {
            match orders.take() {
                Some(SourceOrder::FindWriters) => {
                    let writers: Vec<Box<dyn DirtySource>> = vec![Box::new(Writes { collected: 0 })];
                    sending.tell(SourceNote::Writers(Ok(writers), Holds::default(), 1));
                }
                Some(SourceOrder::Stop) => break,
                Some(SourceOrder::Report(outcome, why)) => panic!("{outcome:?}: {why:?}"),
                _ => thread::sleep(Duration::from_millis(2)),
            }
        }
        // SAFETY: the first byte is mapped, and nothing has a reference to it.
        unsafe { mapping.address().write_volatile(0) };
        let machine = include_str!("../../vm/saved/golden/machine_state-1.json");
        let machine = Box::new(serde_json::from_str(machine).unwrap());
        let (holds, stateful, stop) = (Holds::default(), Vec::new(), Duration::ZERO);
        sending.tell(SourceNote::Stopped(Ok(Stopped { machine, holds, stateful, stop })));
        let ordered = control(&sending, &orders, &AtomicBool::new(false));
        let (outcome, why) = ordered.end.unwrap();
        assert_eq!((outcome, ordered.resumed), (Outcome::Failed, true));
        assert!(why.starts_with("--pmem id=p: discard_writes=on: what the guest has written"), "{why}");
    });
}
