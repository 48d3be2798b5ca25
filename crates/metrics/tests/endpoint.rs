//! The endpoint as scrapers, and worse peers, meet it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_metrics::Endpoint;
use serde_json::json;

fn endpoint() -> Endpoint {
    let scrapes = Arc::new(AtomicU64::new(0));
    let status = move || json!({ "connections": { "open": scrapes.fetch_add(1, Ordering::Relaxed) + 1 } });
    Endpoint::open("127.0.0.1:0".parse().unwrap(), "data.0", status).unwrap()
}

/// Sends bytes and returns the whole answer.
fn ask(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_scraper_gets_the_present_values() {
    let endpoint = endpoint();
    for scrape in 1..=3 {
        let answer = ask(endpoint.address(), b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert!(body.ends_with(&format!("\nimpresario_connections{{server=\"data.0\"}} {scrape}\n")), "{body}");
    }
    let answer = ask(endpoint.address(), b"GET /metrics?x=1 HTTP/1.0\n\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
}

#[test]
fn other_requests_are_refused_by_name() {
    let endpoint = endpoint();
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET /metricsx HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nxx", "405 Method Not Allowed"),
        ("GET /metrics HTTP/2\r\n\r\n", "505 HTTP Version Not Supported"),
        ("GET /metrics\r\n\r\n", "400 Bad Request"),
        ("\r\n\r\n", "400 Bad Request"),
        ("\u{fffd}\u{0}\u{1} a b c\r\n\r\n", "400 Bad Request"),
    ] {
        let answer = ask(endpoint.address(), request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request:?}: {answer}");
    }
    let long = [b"GET /metrics HTTP/1.1\r\nX: ".as_slice(), &[b'x'; 9000]].concat();
    let mut stream = TcpStream::connect(endpoint.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let _ = stream.write_all(&long);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 431 "), "{}", String::from_utf8_lossy(&answer));
}

/// However many peers say nothing, stop in the middle or do not close: they delay no scraper, and the endpoint still ends at once.
#[test]
fn silent_peers_hold_neither_scrapers_nor_the_stop() {
    let endpoint = endpoint();
    let request = b"GET /metrics HTTP/1.1\r\n\r\n";
    let silent: Vec<TcpStream> = (0..100)
        .map(|n| {
            let mut stream = TcpStream::connect(endpoint.address()).unwrap();
            stream.write_all(&request[..[0, 3, 6, request.len()][n % 4]]).unwrap();
            stream
        })
        .collect();
    let began = Instant::now();
    for _ in 0..3 {
        let answer = ask(endpoint.address(), request);
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    }
    // A silent peer alone may stay for ten seconds.
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let address = endpoint.address();
    drop(endpoint);
    assert!(TcpStream::connect(address).is_err(), "nothing listens any more");
    drop(silent);
}

#[test]
fn an_address_in_use_is_named() {
    let endpoint = endpoint();
    let error = Endpoint::open(endpoint.address(), "io.0", || json!({})).err().unwrap().to_string();
    assert!(error.contains(&endpoint.address().to_string()) && error.contains("choose another"), "{error}");
}
