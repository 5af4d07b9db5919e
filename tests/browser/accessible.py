"""What an accessibility audit asks of a page, as one expression for the browser: a list of what is wrong."""

# ruff: noqa: E501

AUDIT = """(() => {
  const wrong = [], seen = e => e.offsetParent !== null;
  if (!document.documentElement.lang) wrong.push('no language');
  if (!document.title.trim()) wrong.push('no title');
  if (!document.querySelector('meta[name=viewport]')) wrong.push('no viewport');
  if (document.querySelectorAll('main').length !== 1) wrong.push('main: ' + document.querySelectorAll('main').length);
  const heads = [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].filter(seen).map(h => [+h.tagName[1], h.textContent]);
  if (heads.filter(h => h[0] === 1).length !== 1) wrong.push('h1: ' + heads.filter(h => h[0] === 1).length);
  heads.forEach((h, i) => { if (i && h[0] > heads[i - 1][0] + 1) wrong.push('heading skips a level: ' + h[1].slice(0, 40)) });
  heads.forEach(h => { if (!h[1].trim()) wrong.push('empty heading') });
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id), twice = ids.filter((id, i) => ids.indexOf(id) !== i);
  if (twice.length) wrong.push('id twice: ' + twice[0]);
  const name = e => e.getAttribute('aria-label') || e.title || e.textContent.trim() || (e.querySelector('img') || {}).alt;
  document.querySelectorAll('a[href], button, summary').forEach(e => { if (seen(e) && !name(e)) wrong.push('no name: ' + e.outerHTML.slice(0, 80)) });
  document.querySelectorAll('input:not([type=hidden]), select, textarea').forEach(e => {
    if (seen(e) && !e.ariaLabel && !e.labels.length && !e.title) wrong.push('no label: ' + e.outerHTML.slice(0, 80)) });
  document.querySelectorAll('img').forEach(e => { if (!e.alt) wrong.push('no alt: ' + e.outerHTML.slice(0, 80)) });
  document.querySelectorAll('[role=img]').forEach(e => { if (!e.getAttribute('aria-label')) wrong.push('drawing without words') });
  document.querySelectorAll('a[href^="#"]').forEach(e => { const to = e.getAttribute('href').slice(1);
    if (to && !to.startsWith('_') && !document.getElementById(decodeURIComponent(to))) wrong.push('leads nowhere: #' + to) });
  document.querySelectorAll('dl').forEach(e => { if (!e.querySelector('dt')) wrong.push('list without terms') });
  return wrong })()"""

CONTRAST = """(() => {
  function linear(x) { x /= 255; return x <= .03928 ? x / 12.92 : Math.pow((x + .055) / 1.055, 2.4) }
  function light(c) { const v = c.map(linear); return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] }
  function parse(s) { return s.match(/[\\d.]+/g).map(Number) }
  function behind(e) { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3) } return [255, 255, 255] }
  let worst = [99, ''];
  const words = 'h1,h2,h3,p,li,td,th,dt,dd,label,small,summary,a,figcaption,footer,blockquote,output,.badge,.verdict,.title,.drawing';
  for (const e of document.querySelectorAll(words)) {
    if (!e.innerText || !e.innerText.trim() || e.offsetParent === null) continue;
    const a = light(parse(getComputedStyle(e).color).slice(0, 3)), b = light(behind(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < worst[0]) worst = [ratio, e.tagName + ' ' + e.className + ' ' + e.innerText.slice(0, 40)];
  }
  return worst })()"""

PAINTED = "(performance.getEntriesByName('first-contentful-paint')[0] || {startTime: 1e9}).startTime"  # milliseconds
