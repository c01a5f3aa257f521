//! A pause by the host, which is neither a reset nor a register change.

use super::*;

fn position(function: &Plain) -> u16 {
    function.run.as_ref().unwrap().queues()[1].1.lock().next_avail()
}

#[test]
fn a_pause_stops_the_queues_in_place_and_changes_no_register() {
    let mut function = threaded();
    driver(&mut function).init();
    wait("the worker is kicked when it starts", || kicks(&function) == 1);
    driver(&mut function).enable_msix(4);
    let before = image(&function);
    for _ in 0..2 {
        function.pause();
        assert!(!function.is_running());
    }
    assert_eq!((join(&mut function), image(&function)), (1, before));
    let mut doorbells = Vec::new();
    function.doorbells(Reach::Device, &mut doorbells);
    assert!(doorbells.is_empty());
    let stood = position(&function);
    assert!(stood >= 1);
    function.resume();
    function.resume();
    wait("the worker is kicked when it starts again", || kicks(&function) == 2);
    assert_eq!(function.device().starts, 2);
    let _ = driver(&mut function).set_bus_master(false);
    join(&mut function);
    assert_eq!(position(&function), stood + 1);
}

#[test]
fn changes_during_a_pause_count_at_its_end() {
    let mut function = idle();
    function.pause();
    assert_eq!(driver(&mut function).init(), 15);
    assert_eq!((function.is_running(), function.device().starts), (false, 0));
    let _ = driver(&mut function).set_bus_master(false);
    function.resume();
    assert!(!function.is_running(), "without Bus Master");
    function.pause();
    let _ = driver(&mut function).set_bus_master(true);
    assert!(!function.is_running());
    function.resume();
    assert!(function.is_running());
    function.pause();
    let _ = driver(&mut function).set_status(0);
    function.resume();
    assert_eq!((function.is_running(), function.device().starts), (false, 1));
}

#[test]
fn a_doorbell_that_queues_share_is_rung_once_when_they_start() {
    let mut function = threaded();
    driver(&mut function).init();
    wait("the worker is kicked when it starts", || kicks(&function) >= 1);
    function.pause();
    join(&mut function);
    let rings = function.device().counters.rings.load(Ordering::Acquire);
    assert!(rings <= 2, "{rings}: the start of three queues is one, the stop another");
}

#[test]
fn queues_that_the_host_cannot_restart_stay_paused_until_it_can() {
    let mut function = threaded();
    driver(&mut function).init();
    function.pause();
    join(&mut function);
    function.device_mut().refuse = true;
    for _ in 0..2 {
        function.resume();
        let NotResumed { vf, error } = Lifecycle::take_not_resumed(&mut *function).unwrap();
        assert_eq!((vf, error.to_string().as_str()), (None, "refused"));
        assert!(!function.is_running() && !function.status().contains(Status::DEVICE_NEEDS_RESET));
    }
    assert_eq!(function.start_failures(), 0);
    // Driver writes during the pause start nothing.
    function.device_mut().refuse = false;
    let _ = driver(&mut function).set_bus_master(false);
    let _ = driver(&mut function).set_bus_master(true);
    assert!(!function.is_running());
    function.resume();
    assert!(function.is_running() && Lifecycle::take_not_resumed(&mut *function).is_none());
}

#[test]
fn an_observer_is_notified_of_each_request_for_a_reset() {
    let heard = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let observer: Arc<NeedsResetObserver> = Arc::new({
        let heard = Arc::clone(&heard);
        move || _ = heard.fetch_add(1, Ordering::AcqRel)
    });
    let mut function = idle();
    Inspect::observe_needs_reset(&*function, &observer);
    for times in 1..=2 {
        driver(&mut function).init();
        let interrupts = function.device().interrupts.clone().unwrap();
        interrupts.ask_for_reset();
        interrupts.ask_for_reset();
        assert_eq!(heard.load(Ordering::Acquire), times, "also after a reset, and once");
        let _ = driver(&mut function).set_status(0);
    }
}
