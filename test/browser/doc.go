// Package browser drives a headless Chromium, for tests of pages.
//
//	b := browser.Start(t)                      // skips the test where there is none
//	p := b.Open(url, browser.Options{Width: 1280, Height: 800, Dark: true})
//	p.Await("it is loaded", `document.body.dataset.ready`)
//	p.Eval(`document.title`, &title)
//	p.Screenshot(path)
//
// The browser has an empty profile, ends with the test, and is told what to do
// through a pipe, in the DevTools protocol. A test that goes through Close of a page
// fails if the page asked for anything of another host, if its script failed, if
// its policy refused something, or if it opened a dialog.
package browser
